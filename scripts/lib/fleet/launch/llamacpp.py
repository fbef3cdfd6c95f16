"""llama.cpp: the embedded server (xllamacpp, in the client's environment) or a llama-server of one's own."""

import os
import sys
from pathlib import Path

import psutil

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.fleet import embedded_server
from scripts.lib.fleet.launch import PORT, ServerPlan, environment_program, with_flags
from scripts.lib.target import embedded
from scripts.lib.target.gguf_header import read_header

_CACHE_BYTES = 2  # of one number in the key-value cache: f16, llama.cpp's default
# Threads that wait must sleep: OpenMP's default is to spin, and then one busy core more (our own clients
# are enough) makes all of them wait for the one that was preempted. Two threads on two cores with a load
# of 8: more than 240 s for what takes 21 s with sleeping waits (27 s with one thread).
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
_MEMORY_SHARE = 0.5  # of the free memory that the key-value caches of all replicas may take


def weights(name: str) -> Path:
    """The GGUF file that `model.name` means."""
    if name == embedded.NAME:
        return embedded.model_path()
    path = Path(name).expanduser().absolute()
    if path.suffix == ".gguf" and path.is_file():
        return path
    raise UserError(f"model.name: engine kind `llamacpp` needs `{embedded.NAME}` or a .gguf file, not `{name}`")


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


def server_plan(config: Config, target_dir: Path) -> ServerPlan:
    """Command of one server: `slots` sequences at once, each with the target's context length."""
    launch = config.engine.launch
    path = weights(config.model.name)
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
