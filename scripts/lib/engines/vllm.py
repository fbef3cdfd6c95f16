"""vLLM: `/v1/completions` with our prompt ids, `return_token_ids` for the sampled ones.

Chat completions would render the messages with the server's template; ids need no template. Tried in
0.32.0 on the CPU: the stop token is among `token_ids`; `stop_reason` is its id, or null when it is the
model's own end of text. A prompt without room for `max_tokens` is answered as far as the room goes. A
request whose client goes away is dropped by the server, there is no abort call.
"""

from pathlib import Path

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
from scripts.lib.engines.completions_api import read_choice, stop_id
from scripts.lib.engines.launching import (
    PORT,
    PROBE_IDS,
    ServerPlan,
    deadlines,
    environment_program,
    merged_flags,
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
)


class VLLM(Adapter):
    """A vLLM server."""

    kind = "vllm"
    exact = True
    hosted = False
    names_its_model = True
    returns_hidden_states = False
    only_gguf = False
    compiles = True
    environment = "vllm"
    metrics = MetricNames(  # read from the /metrics of 0.32; the second name of the cache's use is that of older ones
        running=("num_requests_running",),
        queued=("num_requests_waiting",),
        kv_usage=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        generated=("generation_tokens_total",),
        progress=("generation_tokens_total", "prompt_tokens_total", "kv_cache_usage_perc", "num_requests_running"),
    )

    def check(self) -> None:
        super().check()
        launch = self.config.engine.launch
        if self.config.engine.endpoints:
            return
        parallel_sizes(launch)
        if self.config.sampling.min_p and "speculative-config" in merged_flags({}, launch.flags):
            raise UserError(
                "sampling.min_p: vLLM refuses it with speculation (engine.launch.flags: speculative-config): set it to 0, "
                "or leave speculation out"
            )

    def request(self, request: Request) -> Call:
        return post(
            "/v1/completions",
            {
                "model": self.served_model,
                "prompt": request.prompt_ids,
                "request_id": request.id,  # comes back as `cmpl-` and the id
                "max_tokens": request.max_tokens,
                **sampling_fields(request),
                **seed_field("seed", request),
                "return_token_ids": True,
            },
        )

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        read = read_choice(reply, now)
        if isinstance(read, Failure):
            return read
        body, choice, _ = read
        if failure := of_another(request, body.get("id")) or odd_stop(choice.get("stop_reason")):
            return failure
        ids = read_ids(choice.get("token_ids"), "vLLM >= 0.10.2 with `return_token_ids` is needed")
        if isinstance(ids, Failure):
            return ids
        usage = as_object(body.get("usage"))
        answer = Answer(
            choice["finish_reason"],
            output_ids=ids,
            matched_stop=stop_id(choice),
            text=as_text(choice.get("text")),
            prompt_tokens=as_count(usage.get("prompt_tokens")),
            output_tokens=as_count(usage.get("completion_tokens")),
            model=as_text(body.get("model")) or "",
        )
        return check_ids(request, answer, choice.get("prompt_token_ids"))

    def probe(self) -> list[Call]:
        return [Call("GET", "/v1/models"), Call("GET", "/version")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        models, version = (as_object(reply.json() if reply else None) for reply in replies)
        listed = as_objects(models.get("data"))
        return EngineFacts(
            engine="vllm",
            version=as_text(version.get("version")),
            models=tuple(str(model.get("id", "")) for model in listed),
            context_length=(as_count(listed[0].get("max_model_len")) or None) if listed else None,
            weights=as_text(listed[0].get("root")) if listed else None,
        )

    def one_token(self) -> Call:
        return post("/v1/completions", {"model": self.served_model, "prompt": PROBE_IDS, "max_tokens": 1})

    def server_plan(self, target_dir: Path) -> ServerPlan:
        """Command of one server. Raises UserError for settings that only SGLang has."""
        config, launch = self.config, self.config.engine.launch
        for setting in ("attention_backend", "mamba_strategy"):
            if getattr(launch, setting) is not None:
                raise UserError(
                    f"engine.launch.{setting}: is a setting of SGLang: for vLLM use engine.launch.flags, "
                    "such as `{attention-backend: FLASHINFER}`"
                )
        tensor, data = parallel_sizes(launch)
        context = int(durable.read_json(target_dir / "target.json")["context_length"])
        program = environment_program(launch.environment, "vllm", self.kind)
        ours: dict[str, object] = {
            "revision": config.model.revision,
            "tokenizer": config.model.tokenizer,
            "trust-remote-code": config.model.trust_remote_code,
            "served-model-name": self.served_model,
            "host": "127.0.0.1",
            "port": PORT,
            "tensor-parallel-size": tensor,
            "data-parallel-size": data,
            "max-model-len": context,
            "gpu-memory-utilization": launch.mem_fraction_static,
            "max-num-seqs": launch.max_running_requests,
            "dtype": launch.dtype,
        }
        # Kernels that are compiled while it serves may take longer than its own 300 s for a batch (multiproc_executor.py).
        patience = deadlines(launch.start_timeout, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_ENGINE_READY_TIMEOUT_S")
        return ServerPlan(
            with_flags([program, "serve", model_location(config.model.name)], ours, launch.flags), patience
        )
