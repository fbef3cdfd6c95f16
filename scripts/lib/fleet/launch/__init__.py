"""The command line of each server, built from the configuration."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.target import embedded

PORT = "{port}"  # stands for the port in a command; the keeper picks a free one at each start


@dataclass
class ServerPlan:
    """One server to run: its command with `{port}` in place of the port, and variables to set."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


def served_name(config: Config) -> str:
    """The model name that a server of ours answers to."""
    return config.engine.served_model or config.model.name


def signature(config: Config, target_dir: Path) -> str:
    """Digest of everything that makes a running server fit for this configuration.

    Jobs of one run share servers; jobs of another configuration must not get them.
    """
    patience = {"linger", "crash_budget", "hang_seconds", "start_timeout"}
    facts = target_dir / "target.json"
    return digest(
        {
            "model": config.model.model_dump(mode="json"),
            "kind": config.engine.kind,
            "served": served_name(config),
            "launch": config.engine.launch.model_dump(mode="json", exclude=patience),
            "target": facts.read_text(encoding="utf-8") if facts.exists() else None,
        }
    )


def plan(config: Config, target_dir: Path) -> list[ServerPlan]:
    """The servers to start, one per replica. Raises UserError when the configuration can't be launched."""
    from scripts.lib.fleet.launch import llamacpp, sglang, vllm

    launch = config.engine.launch
    if config.engine.kind == "openai":
        raise UserError("engine.kind: a hosted API is not launched here: set engine.endpoints to its base URL")
    makers = {"llamacpp": llamacpp.server_plan, "sglang": sglang.server_plan, "vllm": vllm.server_plan}
    one = makers[config.engine.kind](config, target_dir)
    common = {**environment_variables(launch.environment), **one.env}
    groups = gpu_groups(launch.replicas, launch.gpus_per_replica)
    return [ServerPlan(one.command, {**common, **gpus, **launch.env}) for gpus in groups]


def gpu_groups(replicas: int, each: int) -> list[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES of each replica, from those that this process may use (Slurm sets them)."""
    if each == 0:
        return [{} for _ in range(replicas)]
    needed = replicas * each
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [device for device in (visible or "").split(",") if device]
    where = "CUDA_VISIBLE_DEVICES names"
    if visible is None:
        # One folder per GPU, made by the NVIDIA driver; absent where the driver hides itself.
        driver = Path("/proc/driver/nvidia/gpus")
        count = len(list(driver.iterdir())) if driver.is_dir() else needed
        devices = [str(index) for index in range(count)]
        where = "this machine has"
    if len(devices) < needed:
        raise UserError(
            f"engine.launch: {replicas} replicas of {each} GPUs need {needed}, {where} {len(devices)}: "
            "lower `replicas` or `gpus_per_replica`, or ask for more GPUs"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[i * each : (i + 1) * each])} for i in range(replicas)]


def environment_program(environment: str | None, program: str, kind: str) -> str:
    """Path of a program in the virtual environment that holds the engine."""
    if environment is None:
        raise UserError(
            f"engine.launch.environment: kind `{kind}` needs the virtual environment that holds it: make one with "
            f"`python -m scripts.create_environment --name {kind} --output .venvs/{kind}` and name it here"
        )
    path = Path(environment).absolute() / "bin" / program
    if not path.exists():
        raise UserError(f"engine.launch.environment: {path} does not exist: is {kind} installed there?")
    return str(path)


def model_location(name: str) -> str:
    """`model.name` as SGLang and vLLM understand it: a folder or file by its whole path, or a Hugging Face id."""
    if name == embedded.NAME:
        raise UserError(f"model.name: `{name}` is for engine kind `llamacpp`: name a Hugging Face model or a folder")
    return str(Path(name).absolute()) if Path(name).exists() else name


def environment_variables(environment: str | None) -> dict[str, str]:
    """Variables that a server needs from its virtual environment, as if that were activated.

    Kernels are compiled at run time by tools of that environment (ninja, nvcc), not by those of ours.
    CUDA_HOME points to the toolkit of the environment's own wheels, where it has one and you set none.
    """
    if environment is None:
        return {}
    root = Path(environment).absolute()
    variables = {"VIRTUAL_ENV": str(root), "PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    toolkits = sorted(root.glob("lib/python3.*/site-packages/nvidia/cu*/bin/nvcc"))
    if toolkits and not os.environ.get("CUDA_HOME"):
        variables["CUDA_HOME"] = str(toolkits[-1].parents[1])
    return variables


def with_flags(command: list[str], ours: dict[str, object], extra: dict[str, object]) -> list[str]:
    """Append `--name value` for each setting; those of `extra` (engine.launch.flags) win.

    True is a bare flag; None and False leave the flag out; a list follows its flag word by word.
    """
    flags = ours | {name.lstrip("-").replace("_", "-"): value for name, value in extra.items()}
    for name, value in flags.items():
        if value is True:
            command = [*command, f"--{name}"]
        elif isinstance(value, list):
            command = [*command, f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            command = [*command, f"--{name}", str(value)]
    return command
