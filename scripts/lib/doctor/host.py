"""The machine: GPUs and their driver, disk, shared memory, file descriptors, ports."""

import os
import re
import resource
import shutil
import socket
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.doctor.findings import OK, PROBLEM, WARNING, Finding, run

# First driver that runs each CUDA major version (CUDA compatibility guide, table "minor version compatibility").
_FIRST_DRIVER = {11: 450, 12: 525, 13: 580}
_QUERY = "index,name,compute_cap,driver_version,memory.total,memory.used"
# Attention backends of SGLang whose kernels exist for other architectures than SM120 only (sglang #12178,
# #17880, #24633; flashinfer #3263).
_NOT_ON_SM120 = {"fa3", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"}


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi; memory in MiB."""

    index: int
    name: str
    capability: str
    driver: str
    memory: int
    used: int


def read_gpus(output: str) -> list[Gpu]:
    """Parse `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`."""
    gpus = []
    for line in output.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 6 and cells[0].isdigit():
            memory = [int(cell) if cell.isdigit() else 0 for cell in cells[4:]]
            gpus.append(Gpu(int(cells[0]), cells[1], cells[2], cells[3], *memory))
    return gpus


def installed_gpus() -> list[Gpu]:
    """The GPUs of this machine, [] without a driver."""
    code, output = run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    return read_gpus(output) if code == 0 else []


def check_gpus(gpus: list[Gpu], needed: int, runtime: tuple[int, int] | None, backend: str | None) -> list[Finding]:
    """GPUs against what the run needs. `runtime` is the CUDA version of the engine's libraries."""
    if not gpus:
        if needed == 0:
            return [Finding("gpu", OK, "none, and none is needed")]
        return [
            Finding(
                "gpu",
                PROBLEM,
                f"nvidia-smi finds no GPU, engine.launch needs {needed}",
                "install the NVIDIA driver (in a container: start it with GPU access), or lower engine.launch",
            )
        ]
    findings = []
    kinds = sorted({f"{gpu.name}, compute capability {gpu.capability}" for gpu in gpus})
    enough = len(gpus) >= needed
    findings.append(
        Finding(
            "gpu",
            OK if enough else PROBLEM,
            f"{len(gpus)} x {'; '.join(kinds)}" + ("" if enough else f", engine.launch needs {needed}"),
            None if enough else "lower engine.launch.replicas or gpus_per_replica",
        )
    )
    driver = gpus[0].driver
    cuda = runtime[0] if runtime else None
    first = _FIRST_DRIVER.get(cuda) if cuda else None
    old = first is not None and int(driver.split(".")[0]) < first
    findings.append(
        Finding(
            "driver",
            PROBLEM if old else OK,
            driver + (f" is too old for CUDA {cuda}" if old else ""),
            f"install driver {first} or newer" if old else None,
        )
    )
    for gpu in gpus[:needed]:
        if gpu.used > 1024:
            findings.append(
                Finding(
                    "gpu memory",
                    WARNING,
                    f"GPU {gpu.index}: {gpu.used} of {gpu.memory} MiB are in use already",
                    "see `nvidia-smi`; servers of this project that a crash left: "
                    "`python -m scripts.stop_servers --state results/state`",
                )
            )
    if backend in _NOT_ON_SM120 and any(gpu.capability.startswith("12.") for gpu in gpus):
        findings.append(
            Finding(
                "attention",
                PROBLEM,
                f"engine.launch.attention_backend `{backend}` has no kernels for SM120",
                "set engine.launch.attention_backend: flashinfer",
            )
        )
    return findings


def check_disk(folder: Path, needed: int, purpose: str) -> Finding:
    """Free bytes of the file system that `folder` is or will be on."""
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    enough = free >= needed
    detail = f"{folder}: {free / 1e9:.1f} GB free" + (
        "" if enough else f", {purpose} needs about {needed / 1e9:.1f} GB"
    )
    return Finding("disk", OK if enough else PROBLEM, detail, None if enough else "free some space")


def check_shared_memory(parallel: int, replicas: int = 1, path: Path = Path("/dev/shm")) -> list[Finding]:
    """NCCL passes data between the processes of one server through /dev/shm; containers give 64 MB of it."""
    if parallel < 2 or not path.is_dir():
        return []
    size, needed = shutil.disk_usage(path).total, replicas << 30
    if size >= needed:
        return [Finding("shared memory", OK, f"/dev/shm has {size / 1e9:.1f} GB")]
    return [
        Finding(
            "shared memory",
            PROBLEM,
            f"/dev/shm has {size / 1e6:.0f} MB, servers on several GPUs need at least 1 GB each, these {replicas} GB",
            f"start the container with `--shm-size={max(16, 2 * replicas)}g` (or `--ipc=host`)",
        )
    ]


def check_descriptors(connections: int) -> Finding:
    """Open files that this shell allows, against one connection per request in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections + 512
    if soft >= needed:
        return Finding("descriptors", OK, f"{soft} open files allowed")
    where = "" if hard >= needed else " (as root, or in /etc/security/limits.conf: the hard limit is too low as well)"
    return Finding(
        "descriptors",
        PROBLEM,
        f"{soft} open files allowed, {connections} requests in flight need {needed}",
        f"`ulimit -n {max(needed, 65536)}`{where}",
    )


def check_ports() -> Finding:
    """Whether a server can listen on the loopback interface and be reached there."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=5):
                return Finding("ports", OK, "a server on 127.0.0.1 can be reached")
    except OSError as error:
        return Finding("ports", PROBLEM, f"127.0.0.1: {error}", "bring the loopback interface up: `ip link set lo up`")


def check_endpoints(urls: list[str]) -> list[Finding]:
    """Whether something listens at each of engine.endpoints."""
    findings = []
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        try:
            with socket.create_connection((parts.hostname or "", port), timeout=10):
                findings.append(Finding("endpoint", OK, f"{url} can be reached"))
        except OSError as error:
            findings.append(
                Finding("endpoint", PROBLEM, f"{url}: {error}", "start that server, or correct engine.endpoints")
            )
    return findings


def check_host(config: Config | None, state: Path, gpus: list[Gpu], runtime: tuple[int, int] | None) -> list[Finding]:
    """All checks of the machine for a configuration (None: whatever it has)."""
    launch = config.engine.launch if config and not config.engine.endpoints else None
    needed = launch.replicas * launch.gpus_per_replica if launch else 0
    connections = sum(lane.concurrency for lane in config.lanes.values()) if config else 200
    findings = check_gpus(gpus, needed, runtime, launch.attention_backend if launch else None)
    findings.append(check_disk(state, 10 << 30 if needed else 1 << 30, "a run"))
    if launch and needed:
        # Kernels that are compiled at run time, such as FlashInfer's.
        cache = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())) / ".cache"
        findings.append(check_disk(cache, 5 << 30, "the cache of compiled kernels"))
        findings += check_shared_memory(launch.gpus_per_replica, launch.replicas)
    findings.append(check_descriptors(connections))
    if config and config.engine.endpoints:
        return findings + check_endpoints(config.engine.endpoints)
    return [*findings, check_ports()]


def version_pair(text: str) -> tuple[int, int] | None:
    """(13, 0) from "13.0" or "13.0.96"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
