"""The servers that a configuration asks for: what makes them fit for it, and their commands, one per replica."""

import os
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.engines import adapter_for
from scripts.lib.engines.launching import ServerPlan, environment_variables


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
    launch = config.engine.launch
    one = adapter_for(config).server_plan(target_dir)
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
