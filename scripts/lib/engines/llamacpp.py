"""llama.cpp's server (`xllamacpp` or any llama-server): prompt ids in, sampled ids out.

Tried on xllamacpp 2026.10.11549: `/completion` takes an id list as `prompt` and adds no BOS to it
(tokens_evaluated equals its length); with `return_tokens` it answers `tokens`, which include the
end-of-turn id when `stop_type` is `eos`. Defaults (top_k 40, top_p .95, min_p .05) apply unless set.
"""

import os
import sys
from pathlib import Path

import psutil

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.engines import embedded_server
from scripts.lib.engines.base import Adapter, Answer, Call, EngineFacts, Failure, Reply, Request, post, seed_field
from scripts.lib.engines.errors import read_body
from scripts.lib.engines.launching import PORT, PROBE_IDS, ServerPlan, environment_program, with_flags
from scripts.lib.engines.metrics import MetricNames
from scripts.lib.engines.values import as_count, as_object, as_objects, as_text, check_ids, read_ids, shown
from scripts.lib.target.gguf import read_header
from scripts.lib.target.location import EMBEDDED, ModelLocation

# Asked for by name, because the full reply repeats all settings and the prompt's text.
_SEED = "generation_settings/seed"
_FIELDS = ["tokens", "stop_type", "tokens_evaluated", "tokens_predicted", "model", _SEED]
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


_CACHE_BYTES = 2  # of one number in the key-value cache: f16, llama.cpp's default
# Threads that wait must sleep: OpenMP's default is to spin, and then one busy core more (our own clients
# are enough) makes all of them wait for the one that was preempted. Two threads on two cores with a load
# of 8: more than 240 s for what takes 21 s with sleeping waits (27 s with one thread).
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
_MEMORY_SHARE = 0.5  # of the free memory that the key-value caches of all replicas may take


def weights(name: str) -> Path:
    """The GGUF file that `model.name` means."""
    path = ModelLocation(name).gguf
    if path and path.is_file():
        return path.absolute()
    raise UserError(f"model.name: engine kind `llamacpp` needs `{EMBEDDED}` or a .gguf file, not `{name}`")


def cache_bytes_per_token(path: Path) -> int:
    """Bytes that one token takes in the key-value cache, from the GGUF header."""
    facts = read_header(path)

    def number(key: str) -> int | None:
        value = facts.get(f"{facts.get('general.architecture')}.{key}")
        return max(value) if isinstance(value, list) else value

    heads = number("attention.head_count") or 1
    width = (number("embedding_length") or 0) // heads
    key, value = number("attention.key_length") or width, number("attention.value_length") or width
    return (number("block_count") or 0) * (number("attention.head_count_kv") or heads) * (key + value) * _CACHE_BYTES


def affordable_slots(wanted: int, context: int, per_token: int, memory: int) -> int:
    """Slots of `context` tokens whose caches fit `memory` bytes, at most `wanted`.

    Fewer slots and not a shorter context: the context decides which prompts fit, slots only how fast.
    Returns 0 when not even one fits.
    """
    return min(wanted, memory // max(1, per_token * context))


class LlamaCpp(Adapter):
    """A llama.cpp server: the embedded one (xllamacpp, in the client's environment) or a llama-server of one's own."""

    kind = "llamacpp"
    exact = True
    hosted = False
    names_its_model = False  # it serves whatever file it has under any name
    returns_hidden_states = False
    only_gguf = True
    compiles = False
    environment = None
    # Read from the /metrics of b11549. tokens_predicted_total moves only when an answer ends.
    metrics = MetricNames(
        running=("requests_processing",),
        queued=("requests_deferred",),
        kv_usage=("kv_cache_usage_ratio",),
        generated=("tokens_predicted_total",),
        progress=("n_decode_total", "prompt_tokens_total", "tokens_predicted_total"),
    )

    def request(self, request: Request) -> Call:
        sampling = request.sampling
        return post(
            "/completion",
            {
                "prompt": request.prompt_ids,
                "n_predict": request.max_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                **seed_field("seed", request),
                "cache_prompt": True,
                "return_tokens": True,
                "response_fields": _FIELDS,
            },
        )

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        body = read_body(reply, now)
        if isinstance(body, Failure):
            return body
        # There is no request id; the seed, which each request of ours has its own of, tells replies apart as well.
        seed = as_count(body.get(_SEED))
        if request.seed is not None and seed not in (None, request.seed):
            return Failure("retry", f"the answer to another request came (seed {seed})", billed=True)
        tokens = read_ids(body.get("tokens"), "is it a llama.cpp that knows `return_tokens`?")
        if isinstance(tokens, Failure):
            return tokens
        finish = _FINISH.get(as_text(body.get("stop_type")) or "")
        if finish is None:
            return Failure("retry", f"no finish reason (stop_type {shown(body.get('stop_type'))})", billed=True)
        answer = Answer(
            finish,
            output_ids=tokens,
            prompt_tokens=as_count(body.get("tokens_evaluated")),
            output_tokens=as_count(body.get("tokens_predicted")),
            model=as_text(body.get("model")) or "",
        )
        return check_ids(request, answer)

    def probe(self) -> list[Call]:
        return [Call("GET", "/v1/models"), Call("GET", "/props")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        models, props = (as_object(reply.json() if reply else None) for reply in replies)
        listed = as_objects(models.get("data"))
        meta = as_object(listed[0].get("meta")) if listed else {}
        defaults = as_object(props.get("default_generation_settings"))
        return EngineFacts(
            engine="llamacpp",
            version=as_text(props.get("build_info")),
            models=tuple(str(model.get("id", "")) for model in listed),
            vocab_size=as_count(meta.get("n_vocab")) or None,
            context_length=as_count(defaults.get("n_ctx")) or as_count(meta.get("n_ctx")) or None,
            weights=as_text(props.get("model_path")),
        )

    def one_token(self) -> Call:
        return post("/completion", {"prompt": PROBE_IDS, "n_predict": 1, "cache_prompt": False})

    def server_plan(self, target_dir: Path) -> ServerPlan:
        """Command of one server: `slots` sequences at once, each with the target's context length."""
        launch = self.config.engine.launch
        path = weights(self.config.model.name)
        context = int(durable.read_json(target_dir / "target.json")["context_length"])
        memory = int(psutil.virtual_memory().available * _MEMORY_SHARE) // launch.replicas
        per_token = cache_bytes_per_token(path)
        slots = affordable_slots(launch.slots, context, per_token, memory)
        if slots == 0:
            raise UserError(
                f"{path}: a context of {context} tokens takes {per_token * context / 1e9:.1f} GB, {memory / 1e9:.1f} GB "
                "of memory may be used: set a smaller model.context_length"
            )
        threads = launch.threads or len(os.sched_getaffinity(0))
        if launch.environment is None:
            command = [sys.executable, "-P", embedded_server.__file__]
            ours = {"model": path, "port": PORT, "slots": slots, "context": slots * context, "threads": threads}
            if launch.flags:
                raise UserError(
                    "engine.launch.flags: the embedded server has none: set engine.launch.environment to use "
                    "a llama-server of your own"
                )
            return ServerPlan(with_flags(command, ours, {}), _ENVIRONMENT)
        command = [environment_program(launch.environment, "llama-server", "llamacpp")]
        ours = {
            "model": path,
            "host": "127.0.0.1",
            "port": PORT,
            "parallel": slots,
            "ctx-size": slots * context,
            "threads": threads,
            "jinja": True,
            "metrics": True,
        }
        return ServerPlan(with_flags(command, ours, launch.flags), _ENVIRONMENT)
