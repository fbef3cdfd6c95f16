"""What hurts servers on GPU hosts besides the GPUs themselves: PCIe, memory nodes, limits, what the kernel has logged.

Every check reads below `root` or a program's output, so that tests give it a made tree. Sources: NVIDIA's tables of Xid
errors and of nvidia-smi's query fields; NVIDIA/nccl issue 1999 and vllm issue 33041 (IOMMU); sglang issue 33187.
"""

import os
import re
import resource
from pathlib import Path

from scripts.lib.config.model import Launch
from scripts.lib.doctor.findings import OK, PROBLEM, WARNING, Finding, run
from scripts.lib.doctor.host import Gpu

_PASSES = ("iommu=pt", "iommu=off", "amd_iommu=off", "intel_iommu=off")  # of the kernel's command line
_THREADS = 2_000  # of one server with its compilers, at most
# Xid errors after which a GPU is not to be trusted: what they mean.
_XIDS = {
    48: "uncorrectable memory error",
    63: "memory rows were remapped",
    64: "memory rows could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
# Bits of clocks_event_reasons.active that cost speed; a power cap alone is how these GPUs work under load.
_SLOWED = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}


def check_gpu_host(gpus: list[Gpu], launch: Launch, root: Path = Path("/")) -> list[Finding]:
    """All checks of a host whose GPUs a configuration uses."""
    environment = {**os.environ, **launch.env}
    return [
        *check_peer_traffic(gpus, launch, root),
        *check_hidden_failures(environment),
        *check_slices(environment.get("CUDA_VISIBLE_DEVICES", ""), launch),
        *check_memory_nodes(launch, root),
        *check_processes(launch.replicas, root),
        *check_kernel_log(run(["dmesg", "--notime"])[1]),
        *check_clocks(run(["nvidia-smi", "--query-gpu=index,clocks_event_reasons.active", "--format=csv,noheader"])[1]),
    ]


def check_peer_traffic(gpus: list[Gpu], launch: Launch, root: Path) -> list[Finding]:
    """GPUs without NVLink talk over PCIe; an IOMMU that translates makes their first collective hang."""
    if launch.gpus_per_replica < 2 or not any(gpu.capability.startswith("12.") for gpu in gpus):
        return []
    units = root / "sys/class/iommu"
    if not units.is_dir() or not any(units.iterdir()):
        return [Finding("peer traffic", OK, "no IOMMU between the GPUs")]
    words = (root / "proc/cmdline").read_text().split() if (root / "proc/cmdline").is_file() else []
    if any(word in _PASSES for word in words) or launch.env.get("NCCL_P2P_DISABLE") == "1":
        return [Finding("peer traffic", OK, "the IOMMU does not translate between the GPUs, or NCCL goes around")]
    return [
        Finding(
            "peer traffic",
            WARNING,
            "the IOMMU translates between the GPUs: servers on several of them may hang at their start",
            'boot with `iommu=pt`, or set engine.launch.env: {NCCL_P2P_DISABLE: "1"}',
        )
    ]


def check_hidden_failures(environment: dict[str, str]) -> list[Finding]:
    """SGLang can be told to go on with random tokens where its numbers broke: nobody would ever know."""
    if environment.get("SGLANG_SANITIZE_NAN_LOGITS", "").lower() not in ("1", "true", "yes"):
        return []
    detail = (
        "SGLANG_SANITIZE_NAN_LOGITS is set: where numbers break, SGLang answers with random tokens and says nothing"
    )
    return [Finding("hidden faults", PROBLEM, detail, "unset SGLANG_SANITIZE_NAN_LOGITS")]


def check_slices(visible: str, launch: Launch) -> list[Finding]:
    """Slices of a GPU (MIG) can't reach each other."""
    if "MIG-" not in visible or launch.gpus_per_replica < 2:
        return []
    detail = f"CUDA_VISIBLE_DEVICES names slices (MIG), a server is to use {launch.gpus_per_replica} of them together"
    return [Finding("slices", PROBLEM, detail, "set gpus_per_replica: 1, or name whole GPUs")]


def check_memory_nodes(launch: Launch, root: Path) -> list[Finding]:
    """A server whose GPUs hang on two processors sends everything over the link between them."""
    each = launch.gpus_per_replica
    folder = root / "proc/driver/nvidia/gpus"
    if each < 2 or not folder.is_dir():
        return []
    nodes = []
    for gpu in sorted(folder.iterdir()):
        file = root / "sys/bus/pci/devices" / gpu.name / "numa_node"
        nodes.append(int(file.read_text()) if file.is_file() else -1)
    groups = [set(nodes[start : start + each]) for start in range(0, launch.replicas * each, each)]
    split = [index for index, group in enumerate(groups) if len(group) > 1]
    if not split or len(nodes) == each:
        return []
    some = ", ".join(map(str, split[:8]))
    detail = f"GPUs of server {some} are on several memory nodes (by GPU: {', '.join(map(str, nodes))})"
    fix = "name the GPUs of one node after each other in CUDA_VISIBLE_DEVICES"
    return [Finding("memory nodes", WARNING, detail, fix)]


def check_processes(replicas: int, root: Path) -> list[Finding]:
    """Processes and threads that this shell, and its container, allow."""
    needed = _THREADS * replicas
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = [("ulimit -u", soft)] if soft != resource.RLIM_INFINITY else []
    limit = root / "sys/fs/cgroup/pids.max"
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        allowed.append(("the container's pids limit", int(text)))
    fixes = {"ulimit -u": f"`ulimit -u {needed}`", "the container's pids limit": "start it with `--pids-limit=-1`"}
    low = [(name, count) for name, count in allowed if count < needed]
    return [
        Finding("processes", WARNING, f"{name} allows {count}, {replicas} servers may need {needed}", fixes[name])
        for name, count in low
    ]


def check_kernel_log(log: str) -> list[Finding]:
    """Errors of GPUs since the machine was started, as the kernel's log has them."""
    found: dict[str, set[int]] = {}
    for line in _XID.finditer(log):
        if int(line["code"]) in _XIDS:
            found.setdefault(line["gpu"], set()).add(int(line["code"]))
    return [
        Finding(
            "gpu errors",
            WARNING,
            f"GPU {gpu}: " + "; ".join(f"{_XIDS[code]} (Xid {code})" for code in sorted(codes)),
            "leave it out (CUDA_VISIBLE_DEVICES) until the machine was restarted, and have it replaced when it comes again",
        )
        for gpu, codes in sorted(found.items())
    ]


def check_clocks(output: str) -> list[Finding]:
    """GPUs that are slowed down at this moment (lines of `index, 0x...`)."""
    findings = []
    for index, reasons in re.findall(r"^(\d+), (0x[0-9a-fA-F]+)$", output, re.MULTILINE):
        why = [name for bit, name in _SLOWED.items() if int(reasons, 16) & bit]
        if why:
            fix = "see `nvidia-smi -q -d TEMPERATURE,POWER`: cooling, cables, power supply"
            findings.append(Finding("clocks", WARNING, f"GPU {index} is slowed down: {', '.join(why)}", fix))
    return findings
