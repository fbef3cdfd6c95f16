"""Command lines of servers: what those of all engines have in common."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Launch
from scripts.lib.core.errors import UserError
from scripts.lib.target.location import EMBEDDED, ModelLocation

OTHER_PORT = "{other_port}"  # for a port that a server needs besides, of its own choice otherwise
# Any ids of any vocabulary, for a token whose value doesn't matter.
PROBE_IDS = [1, 2, 3]
PORT = "{port}"  # stands for the port in a command; the keeper picks a free one at each start


@dataclass
class ServerPlan:
    """One server to run: its command with `{port}` in place of the port, and variables to set."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


# Flags under which people say themselves how a server spreads over GPUs or machines.
_SPREAD = {
    *("tp", "tp-size", "tensor-parallel-size", "dp", "dp-size", "data-parallel-size", "attn-dp-size", "pp", "pp-size"),
    *(
        "pipeline-parallel-size",
        "enable-dp-attention",
        "nnodes",
        "prefill-context-parallel-size",
        "decode-context-parallel-size",
    ),
}


def parallel_sizes(launch: Launch) -> tuple[int | None, int | None]:
    """(GPUs of one copy of the model, copies in a server); None for what `launch.flags` say.

    Raises UserError when they don't make up `gpus_per_replica`: GPUs would be taken and left idle, or missing.
    """
    gpus, data = launch.gpus_per_replica, launch.data_parallel
    users = merged_flags({}, launch.flags)
    if str(users.get("nnodes") or 1) != "1" or str(users.get("node-rank") or 0) != "0":
        raise UserError(
            "engine.launch.flags: nnodes: a server over several machines is not started here, since a node but the first never "
            "answers: start its nodes yourself (one command on each) and name the first one in engine.endpoints"
        )
    if _SPREAD & {name for name, value in users.items() if value not in (None, False)}:
        return launch.tensor_parallel, data if data > 1 else None
    tensor = launch.tensor_parallel or max(1, gpus // data)
    if tensor * data != max(1, gpus):
        raise UserError(
            f"engine.launch: tensor_parallel {tensor} x data_parallel {data} make {tensor * data} GPUs a server, "
            f"gpus_per_replica is {gpus}: set it to their product (or leave tensor_parallel out)"
        )
    return tensor, data


def deadlines(seconds: float, *names: str) -> dict[str, str]:
    """Variables of an engine's own deadlines, so that none ends a start that `start_timeout` still allows."""
    return {name: str(int(seconds)) for name in names if name not in os.environ}


def environment_program(environment: str | None, program: str, kind: str) -> str:
    """Path of a program in the virtual environment that holds an engine of this kind."""
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
    if name == EMBEDDED:
        raise UserError(f"model.name: `{name}` is for engine kind `llamacpp`: name a Hugging Face model or a folder")
    return ModelLocation(name).for_engine()


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


def flag_name(name: str) -> str:
    """A flag as it is written on a command line, without its dashes: people write `--a_b`, `a_b` and `a-b`."""
    return name.lstrip("-").replace("_", "-")


def merged_flags(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a server by flag name; those of `theirs` win."""
    return {flag_name(name): value for name, value in (*ours.items(), *theirs.items())}


def with_flags(command: list[str], ours: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    """Append `--name value` for each setting; those of `extra` (engine.launch.flags) win.

    True is a bare flag; None and False leave the flag out; a list follows its flag word by word.
    """
    for name, value in merged_flags(ours, extra).items():
        if value is True:
            command = [*command, f"--{name}"]
        elif isinstance(value, list):
            command = [*command, f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            command = [*command, f"--{name}", str(value)]
    return command
