"""SGLang's command line, in the words of the installed version."""

import functools
import re
import subprocess
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.fleet.launch import PORT, ServerPlan, environment_program, model_location, served_name, with_flags

# The mamba strategy's flag, newest name first. 0.5.23 knows only the first one (sglang issue #27418).
MAMBA_FLAGS = ("mamba-radix-cache-strategy", "mamba-scheduler-strategy")
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


def server_plan(config: Config, target_dir: Path) -> ServerPlan:
    """Command of one SGLang server, and the variables that it needs."""
    launch = config.engine.launch
    python = environment_program(launch.environment, "python", "sglang")
    context = int(durable.read_json(target_dir / "target.json")["context_length"])
    ours: dict[str, object] = {
        "model-path": model_location(config.model.name),
        "revision": config.model.revision,
        "tokenizer-path": config.model.tokenizer,
        "trust-remote-code": config.model.trust_remote_code,
        "served-model-name": served_name(config),
        "host": "127.0.0.1",
        "port": PORT,
        "tp-size": launch.tensor_parallel,
        "dp-size": launch.data_parallel,
        "context-length": context,
        "attention-backend": launch.attention_backend,
        "mem-fraction-static": launch.mem_fraction_static,
        "max-running-requests": launch.max_running_requests,
        "reasoning-parser": launch.reasoning_parser,
        "dtype": launch.dtype,
        # Load and hang detection read /metrics, which is 404 without this.
        "enable-metrics": True,
    }
    if launch.gpus_per_replica == 0:
        ours["device"] = "cpu"
    if launch.mamba_strategy:
        flag, strategy = mamba_flag(installed_help(python), launch.mamba_strategy)
        ours[flag] = strategy
    return ServerPlan(with_flags([python, "-m", "sglang.launch_server"], ours, launch.flags))
