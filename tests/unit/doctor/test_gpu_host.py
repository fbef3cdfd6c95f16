"""Checks of a GPU host, on made trees and made output of its programs."""

import resource
from pathlib import Path

import pytest

from scripts.lib.config.model import Launch
from scripts.lib.doctor import gpu_host, host
from scripts.lib.doctor.findings import OK, PROBLEM, WARNING, Finding
from scripts.lib.doctor.host import Gpu

PRO = [Gpu(index, "NVIDIA RTX PRO 6000", "12.0", "580.1", 97887, 0) for index in range(8)]
HOPPER = [Gpu(index, "NVIDIA H200", "9.0", "580.1", 143771, 0) for index in range(8)]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def level(findings: list[Finding]) -> str | None:
    assert len(findings) <= 1
    assert all(finding.fix for finding in findings if finding.level != OK)
    return findings[0].level if findings else None


@pytest.mark.parametrize(
    ("gpus", "launch", "cmdline", "iommu", "expected"),
    [
        (PRO, {"gpus_per_replica": 2}, "quiet splash", True, WARNING),
        (PRO, {"gpus_per_replica": 2}, "quiet intel_iommu=on", True, WARNING),
        (PRO, {"gpus_per_replica": 2}, "quiet iommu=pt", True, OK),
        (PRO, {"gpus_per_replica": 2}, "amd_iommu=off", True, OK),
        (PRO, {"gpus_per_replica": 2}, "quiet", False, OK),
        (PRO, {"gpus_per_replica": 2, "env": {"NCCL_P2P_DISABLE": "1"}}, "quiet", True, OK),
        (PRO, {"gpus_per_replica": 1}, "quiet", True, None),
        (HOPPER, {"gpus_per_replica": 8}, "quiet", True, None),
    ],
)
def test_gpus_that_talk_over_pcie_through_an_iommu(gpus, launch, cmdline, iommu, expected, tmp_path):
    files = {"proc/cmdline": cmdline} | ({"sys/class/iommu/dmar0/x": ""} if iommu else {})
    assert level(gpu_host.check_peer_traffic(gpus, Launch(**launch), tree(tmp_path, files))) == expected


@pytest.mark.parametrize(("value", "expected"), [("1", PROBLEM), ("true", PROBLEM), ("0", None), ("", None)])
def test_random_tokens_in_place_of_broken_numbers_are_a_problem(value, expected):
    assert level(gpu_host.check_hidden_failures({"SGLANG_SANITIZE_NAN_LOGITS": value})) == expected


@pytest.mark.parametrize(
    ("visible", "each", "expected"), [("MIG-a,MIG-b", 2, PROBLEM), ("MIG-a,MIG-b", 1, None), ("GPU-a,GPU-b", 2, None)]
)
def test_slices_do_not_work_together(visible, each, expected):
    assert level(gpu_host.check_slices(visible, Launch(gpus_per_replica=each))) == expected


@pytest.mark.parametrize(
    ("nodes", "each", "expected"),
    [
        ([0, 0, 1, 1], 2, None),
        ([0, 1, 0, 1], 2, WARNING),
        ([0, 1, 0, 1], 1, None),
        ([0, 0, 1, 1], 4, None),  # one server on all of them has no choice
    ],
)
def test_gpus_of_one_server_on_two_memory_nodes(nodes, each, expected, tmp_path):
    files = {}
    for index, node in enumerate(nodes):
        files[f"proc/driver/nvidia/gpus/0000:{index}1:00.0/information"] = ""
        files[f"sys/bus/pci/devices/0000:{index}1:00.0/numa_node"] = f"{node}\n"
    launch = Launch(gpus_per_replica=each, replicas=len(nodes) // each)
    assert level(gpu_host.check_memory_nodes(launch, tree(tmp_path, files))) == expected


@pytest.mark.parametrize(("limit", "expected"), [("max", None), ("1024", WARNING), ("100000", None)])
def test_processes_of_a_container(limit, expected, tmp_path, monkeypatch):
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinity, infinity))
    assert level(gpu_host.check_processes(8, tree(tmp_path, {"sys/fs/cgroup/pids.max": limit}))) == expected


def test_processes_of_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert level(gpu_host.check_processes(8, tmp_path)) == WARNING
    assert level(gpu_host.check_processes(1, tmp_path)) is None


def test_errors_that_the_kernel_has_logged():
    log = """\
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.82.07
NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:81:00): 13, pid=4711, name=python, Graphics Exception
NVRM: Xid (PCI:0000:c1:00): 94, pid=1, name=x, Contained
NVRM: Xid (PCI:0000:c1:00): 63, pid=1, name=x, Row Remapper
"""
    first, second = gpu_host.check_kernel_log(log)
    assert first.detail == "GPU 0000:41:00: the GPU has fallen off the bus (Xid 79)"
    assert second.detail == "GPU 0000:c1:00: memory rows were remapped (Xid 63); contained memory error (Xid 94)"
    assert gpu_host.check_kernel_log("dmesg: read kernel buffer failed: Operation not permitted\n") == []


def test_gpus_that_are_slowed_down():
    output = "0, 0x0000000000000001\n1, 0x0000000000000004\n2, 0x0000000000000048\n3, [N/A]\n"
    (finding,) = gpu_host.check_clocks(output)
    assert finding.detail == "GPU 2 is slowed down: hardware slowdown, too hot (hardware)"
    assert gpu_host.check_clocks("nvidia-smi: no such program") == []


def test_shared_memory_is_for_every_server(tmp_path, monkeypatch):
    usage = type("Usage", (), {"total": 4 << 30})
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)
    assert host.check_shared_memory(2, 4, tmp_path)[0].level == OK
    (finding,) = host.check_shared_memory(2, 8, tmp_path)
    assert (finding.level, finding.fix) == (PROBLEM, "start the container with `--shm-size=16g` (or `--ipc=host`)")
    assert host.check_shared_memory(1, 8, tmp_path) == []
