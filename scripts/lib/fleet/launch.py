"""The servers that a configuration asks for: what makes them fit for it, and their commands, one per replica."""

import os
from pathlib import Path

import psutil

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.engines import adapter_for
from scripts.lib.engines.launching import ServerPlan, environment_variables

_COMPILER_BYTES = 8 << 30  # of memory that one nvcc takes at most (flashinfer issue 3634)
# One folder per GPU, made by the NVIDIA driver; absent where the driver hides itself.
_DRIVER = Path("/proc/driver/nvidia/gpus")


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
            "served": config.served_name,
            "launch": config.engine.launch.model_dump(mode="json", exclude=patience),
            "target": facts.read_text(encoding="utf-8") if facts.exists() else None,
        }
    )


def plan(config: Config, target_dir: Path) -> list[ServerPlan]:
    """The servers to start, one per replica. Raises UserError when the configuration can't be launched."""
    launch, adapter = config.engine.launch, adapter_for(config)
    one = adapter.server_plan(target_dir)
    common = {**environment_variables(launch.environment), **one.env}
    if launch.gpus_per_replica:
        common |= compiler_jobs(launch.replicas)
    elif adapter.environment and "CUDA_VISIBLE_DEVICES" not in launch.env and (found := _gpus_here()):
        raise UserError(
            f"engine.launch.gpus_per_replica: is 0, and there are {found} GPUs here, of which no server would get its own: "
            'set it, or `env: {CUDA_VISIBLE_DEVICES: ""}` for servers on the CPU'
        )
    groups = gpu_groups(launch.replicas, launch.gpus_per_replica)
    return [ServerPlan(one.command, {**common, **gpus, **launch.env}) for gpus in groups]


def compiler_jobs(replicas: int) -> dict[str, str]:
    """How many compilers one server may run at once, unless the environment says it.

    ninja starts one per core, up to 8 GiB each: one engine took 91 GiB, two were killed (vllm issue 54237).
    """
    if "MAX_JOBS" in os.environ:
        return {}
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
    jobs = str(max(1, min(cores, memory // _COMPILER_BYTES) // replicas))
    return {"MAX_JOBS": jobs, "FLASHINFER_JIT_PREBUILD_MAX_JOBS": jobs}


def _gpus_here() -> int:
    """GPUs that a process started here may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device and device != "-1"])
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def gpu_groups(replicas: int, each: int) -> list[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES of each replica, from those that this process may use (Slurm sets them)."""
    if each == 0:
        return [{} for _ in range(replicas)]
    needed = replicas * each
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [device for device in (visible or "").split(",") if device]
    where = "CUDA_VISIBLE_DEVICES names"
    if visible is None:
        count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else needed
        devices = [str(index) for index in range(count)]
        where = "this machine has"
    if len(devices) < needed:
        raise UserError(
            f"engine.launch: {replicas} replicas of {each} GPUs need {needed}, {where} {len(devices)}: "
            "lower `replicas` or `gpus_per_replica`, or ask for more GPUs"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[i * each : (i + 1) * each])} for i in range(replicas)]
