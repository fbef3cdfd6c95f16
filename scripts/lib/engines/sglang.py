"""SGLang: `/generate` with our prompt ids (native), or chat completions that return ids.

Read in 0.5.23 and tried there on the CPU: `/generate` takes `input_ids` and a request id `rid`, and
answers `output_ids` with the stop token, `meta_info.finish_reason` as {"type", "matched"}. `top_k` -1
turns it off. `sampling_seed` has an effect only with deterministic inference switched on. Chat takes
`input_ids` in place of the rendered messages; `return_token_ids` gives `response_token_ids`.
"""

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.engines.base import (
    Adapter,
    Answer,
    Call,
    EngineFacts,
    Failure,
    Reply,
    Request,
    post,
    sampling_fields,
    seed_field,
)
from scripts.lib.engines.completions_api import read_choice, reasoning_of, stop_id, wire_messages
from scripts.lib.engines.errors import read_body, read_error
from scripts.lib.engines.launching import (
    OTHER_PORT,
    PORT,
    PROBE_IDS,
    ServerPlan,
    deadlines,
    environment_program,
    model_location,
    parallel_sizes,
    with_flags,
)
from scripts.lib.engines.metrics import MetricNames
from scripts.lib.engines.values import (
    as_count,
    as_object,
    as_objects,
    as_text,
    check_ids,
    odd_stop,
    of_another,
    read_ids,
    shown,
)

# The mamba strategy's flag, newest name first. 0.5.23 knows only the first one (sglang issue #27418).
MAMBA_FLAGS = ("mamba-radix-cache-strategy", "mamba-scheduler-strategy")
_WATCHDOG_SECONDS = 300  # its own: a batch that takes longer ends the server (arg_groups/fields/device.py)
_LARGEST_PENALTY = 2.0  # sampling_params.py
_INPUT_SPARE = 5  # tokens by which the longest input is shorter than the longest request
_DRAFTING = (
    "EAGLE",
    "FROZEN",
    "NEXTN",
    "MTP",
    "STANDALONE",
)  # names of speculation that reserves tokens for its drafts
_HELP_SECONDS = 300  # importing SGLang from a cold network disk takes minutes


@functools.cache
def installed_help(python: str) -> str:
    """What `--help` of the installed SGLang prints. Raises UserError with its last lines when it can't run."""
    command = [python, "-m", "sglang.launch_server", "--help"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HELP_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"`{' '.join(command)}` did not answer within {_HELP_SECONDS} s") from None
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-10:])
        raise UserError(f"`{' '.join(command)}` failed (run `make doctor`):\n  {last}")
    return done.stdout


def mamba_flag(help_text: str, strategy: str) -> tuple[str, str]:
    """Flag and value of the mamba cache strategy in the installed version.

    Raises UserError when that version has neither name of the flag, or not this strategy.
    """
    for name in MAMBA_FLAGS:
        found = re.search(rf"--{name}\b(?:[ =]+\{{(?P<choices>[^}}]*)\}})?", help_text)
        if not found:
            continue
        choices = [choice.strip() for choice in (found["choices"] or "").split(",") if choice.strip()]
        if choices and strategy not in choices:
            raise UserError(
                f"engine.launch.mamba_strategy: the installed SGLang knows {', '.join(choices)}, not `{strategy}`"
            )
        return name, strategy
    raise UserError(
        f"engine.launch.mamba_strategy: the installed SGLang has none of {', '.join('--' + n for n in MAMBA_FLAGS)}: "
        "leave the setting out or install another version"
    )


def _room(context: int, server: dict[str, Any]) -> tuple[int, str | None]:
    """(most tokens of a prompt and its answer together, what there is to say about it), from /server_info.

    Its longest request is a token shorter than context and key-value cache, and the scheduler keeps one more
    (tp_worker.py, scheduler.py of 0.5.23); what is longer is cut short, and called `length`. EAGLE and its like refuse a
    request that leaves no place for their drafts (managers/utils.py).
    """
    pool = as_count(server.get("max_total_num_tokens"))
    longest_input = as_count(server.get("max_req_input_len"))
    longest = min(
        context - 1,
        pool - 1 if pool else context,
        longest_input + _INPUT_SPARE if longest_input else context,
    )
    drafts = 0
    if str(server.get("speculative_algorithm") or "").upper().startswith(_DRAFTING):
        steps, branches, tokens = (
            as_count(server.get(f"speculative_{name}")) or 0 for name in ("num_steps", "eagle_topk", "num_draft_tokens")
        )
        drafts = max(steps * branches, tokens)
    if longest == context - 1:
        return min(longest - 1, context - drafts), None
    what = (
        f"key-value cache holds {pool} tokens"
        if pool and pool <= longest + 1
        else f"longest request is {longest} tokens"
    )
    warning = (
        f"its {what}, less than its context of {context}: longer prompts are given up, longer answers cut: give it more "
        "memory (mem_fraction_static, tensor_parallel), or set model.context_length"
    )
    return min(longest - 1, context - drafts), warning


class SGLang(Adapter):
    """An SGLang server, or natively of sglang-router in front of several.

    The router (0.3.2) passes on only the chat fields that it knows: not `input_ids`, `rid`, `return_token_ids`.
    """

    kind = "sglang"
    exact = True
    hosted = False
    names_its_model = True
    returns_hidden_states = True
    only_gguf = False
    compiles = True
    environment = "sglang"
    metrics = MetricNames(  # read from the /metrics of 0.5.23
        running=("num_running_reqs",),
        queued=("num_queue_reqs",),
        kv_usage=("token_usage",),
        generated=("generation_tokens_total",),
        progress=(
            "generation_tokens_total",
            "realtime_tokens_total",
            "num_used_tokens",
            "token_usage",
            "gen_throughput",
            "num_running_reqs",
        ),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chat = config.engine.api == "chat"

    def check(self) -> None:
        super().check()
        if self.config.sampling.repetition_penalty > _LARGEST_PENALTY:
            penalty = self.config.sampling.repetition_penalty
            raise UserError(
                f"sampling.repetition_penalty: SGLang refuses more than {_LARGEST_PENALTY}, not to say {penalty}"
            )
        if not self.config.engine.endpoints:
            parallel_sizes(self.config.engine.launch)

    def request(self, request: Request) -> Call:
        return self._chat_request(request) if self.chat else self._native_request(request)

    def _native_request(self, request: Request) -> Call:
        return post(
            "/generate",
            {
                "input_ids": request.prompt_ids,
                "rid": request.id,
                "sampling_params": {
                    "max_new_tokens": request.max_tokens,
                    **sampling_fields(request),
                    **seed_field("sampling_seed", request),
                },
            },
        )

    def _chat_request(self, request: Request) -> Call:
        return post(
            "/v1/chat/completions",
            {
                "model": self.served_model,
                "messages": wire_messages(request.messages),
                "input_ids": request.prompt_ids,
                "rid": request.id,
                "max_tokens": request.max_tokens,
                **sampling_fields(request),
                **seed_field("seed", request),
                "return_token_ids": True,
                "return_prompt_token_ids": True,
            },
        )

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        return self._read_chat(request, reply, now) if self.chat else self._read_native(request, reply, now)

    def _read_native(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        body = read_body(reply, now)
        if isinstance(body, Failure):
            return body
        meta = as_object(body.get("meta_info"))
        reason = meta.get("finish_reason")
        reason = reason if isinstance(reason, dict) else {"type": reason}
        if failure := of_another(request, meta.get("id")) or odd_stop(reason.get("matched")):
            return failure
        if reason.get("type") == "abort":
            status = as_count(reason.get("status_code"))
            if status in (400, 503):
                return read_error(status, reply.headers, shown(reason.get("message")).encode(), now)
            return Failure(
                "retry", f"aborted by the engine: {shown(reason.get('message') or 'no reason given')}", billed=True
            )
        if reason.get("type") not in ("stop", "length"):
            return Failure("retry", f"no finish reason but {shown(reason.get('type'))}", billed=True)
        ids = read_ids(body.get("output_ids"), "is it SGLang's /generate?")
        if isinstance(ids, Failure):
            return ids
        answer = Answer(
            reason["type"],
            output_ids=ids,
            matched_stop=as_count(reason.get("matched")),
            prompt_tokens=as_count(meta.get("prompt_tokens")),
            output_tokens=as_count(meta.get("completion_tokens")),
            model=self.served_model,
        )
        return check_ids(request, answer, body.get("prompt_token_ids"))

    def _read_chat(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        read = read_choice(reply, now)
        if isinstance(read, Failure):
            return read
        body, choice, message = read
        if failure := of_another(request, body.get("id")) or odd_stop(choice.get("matched_stop")):
            return failure
        ids = read_ids(
            choice.get("response_token_ids"),
            "set engine.api to native (SGLang without `return_token_ids` is too old for chat, and sglang-router takes "
            "that field away)",
        )
        if isinstance(ids, Failure):
            return ids
        usage = as_object(body.get("usage"))
        answer = Answer(
            choice["finish_reason"],
            output_ids=ids,
            matched_stop=stop_id(choice),
            text=as_text(message.get("content")),
            reasoning=reasoning_of(message),
            prompt_tokens=as_count(usage.get("prompt_tokens")),
            output_tokens=as_count(usage.get("completion_tokens")),
            model=as_text(body.get("model")) or "",
        )
        return check_ids(request, answer, choice.get("prompt_token_ids"))

    def abort(self, request_id: str) -> Call | None:
        return post("/abort_request", {"rid": request_id})

    def probe(self) -> list[Call]:
        return [Call("GET", "/v1/models"), Call("GET", "/server_info")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        models, server = (as_object(reply.json() if reply else None) for reply in replies)
        listed = as_objects(models.get("data"))
        context = (as_count(listed[0].get("max_model_len")) or None) if listed else None
        room, warning = _room(context, server) if context and server else (None, None)
        return EngineFacts(
            engine=self.kind,
            version=as_text(server.get("version")),
            models=tuple(str(model.get("id", "")) for model in listed),
            context_length=context,
            room=room,
            warning=warning,
            weights=as_text(server.get("model_path")),
        )

    def one_token(self) -> Call:
        return post("/generate", {"input_ids": PROBE_IDS, "sampling_params": {"max_new_tokens": 1}})

    def server_plan(self, target_dir: Path) -> ServerPlan:
        """Command of one server, in the words of the installed version."""
        config, launch = self.config, self.config.engine.launch
        python = environment_program(launch.environment, "python", self.kind)
        tensor, data = parallel_sizes(launch)
        context = int(durable.read_json(target_dir / "target.json")["context_length"])
        ours: dict[str, object] = {
            "model-path": model_location(config.model.name),
            "revision": config.model.revision,
            "tokenizer-path": config.model.tokenizer,
            "trust-remote-code": config.model.trust_remote_code,
            "served-model-name": self.served_model,
            "host": "127.0.0.1",
            "port": PORT,
            # Several copies in one server take one each, which it chooses.
            "nccl-port": OTHER_PORT if data == 1 else None,
            "tp-size": tensor,
            "dp-size": data,
            "context-length": context,
            "attention-backend": launch.attention_backend,
            "mem-fraction-static": launch.mem_fraction_static,
            "max-running-requests": launch.max_running_requests,
            "dtype": launch.dtype,
            "watchdog-timeout": int(max(_WATCHDOG_SECONDS, launch.start_timeout)),
            # Load and hang detection read /metrics, which is 404 without this.
            "enable-metrics": True,
        }
        if launch.gpus_per_replica == 0:
            ours["device"] = "cpu"
        if launch.mamba_strategy:
            flag, strategy = mamba_flag(installed_help(python), launch.mamba_strategy)
            ours[flag] = strategy
        # It kills itself when its first batch, which compiles kernels, takes longer (http_server.py of 0.5.23: 600 s).
        patience = deadlines(launch.start_timeout, "SGLANG_WARMUP_TIMEOUT")
        return ServerPlan(with_flags([python, "-m", "sglang.launch_server"], ours, launch.flags), patience)
