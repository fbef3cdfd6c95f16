"""vLLM's command line."""

from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.fleet.launch import PORT, ServerPlan, environment_program, model_location, served_name, with_flags


def server_plan(config: Config, target_dir: Path) -> ServerPlan:
    """Command of one vLLM server. Raises UserError for settings that only SGLang has."""
    launch = config.engine.launch
    for setting in ("attention_backend", "mamba_strategy"):
        if getattr(launch, setting) is not None:
            raise UserError(
                f"engine.launch.{setting}: is a setting of SGLang: for vLLM use engine.launch.flags, "
                "such as `{attention-backend: FLASHINFER}`"
            )
    context = int(durable.read_json(target_dir / "target.json")["context_length"])
    program = environment_program(launch.environment, "vllm", "vllm")
    ours: dict[str, object] = {
        "revision": config.model.revision,
        "tokenizer": config.model.tokenizer,
        "trust-remote-code": config.model.trust_remote_code,
        "served-model-name": served_name(config),
        "host": "127.0.0.1",
        "port": PORT,
        "tensor-parallel-size": launch.tensor_parallel,
        "data-parallel-size": launch.data_parallel,
        "max-model-len": context,
        "gpu-memory-utilization": launch.mem_fraction_static,
        "max-num-seqs": launch.max_running_requests,
        "reasoning-parser": launch.reasoning_parser,
        "dtype": launch.dtype,
    }
    return ServerPlan(with_flags([program, "serve", model_location(config.model.name)], ours, launch.flags))
