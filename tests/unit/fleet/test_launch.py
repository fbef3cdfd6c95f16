"""What servers a configuration asks for, and which GPUs each of them gets."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.fleet import launch
from scripts.lib.fleet.launch import gpu_groups, signature
from tests.launches import configured, target_of_4096


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_of_4096(tmp_path)


def test_gpus_are_those_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb,GPU-cc,GPU-dd")
    assert [group["CUDA_VISIBLE_DEVICES"] for group in gpu_groups(2, 2)] == ["GPU-aa,GPU-bb", "GPU-cc,GPU-dd"]
    with pytest.raises(UserError, match="3 replicas of 2 GPUs need 6, CUDA_VISIBLE_DEVICES names 4"):
        gpu_groups(3, 2)
    assert gpu_groups(2, 0) == [{}, {}]


def test_signature_changes_with_what_makes_another_server(target: Path) -> None:
    base = signature(configured(), target)
    assert signature(configured(linger=1, crash_budget=9, hang_seconds=5, start_timeout=7), target) == base
    assert signature(configured(slots=3), target) != base
    assert signature(configured(model={"date": "2027-01-01"}), target) != base
    durable.write_json(target / "target.json", {"context_length": 8192})
    assert signature(configured(), target) != base


@pytest.fixture
def program(tmp_path: Path) -> str:
    for name in ("python", "vllm"):
        path = tmp_path / "venv" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(tmp_path / "venv")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_servers_without_gpus_of_their_own_are_refused_where_there_are_some(
    kind: str, target: Path, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight vLLM servers would all take the first GPU, eight SGLang servers none."""
    model = {"name": "owner/model"}
    config = configured(kind, model=model, environment=program, replicas=8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "_DRIVER", tmp_path / "nvidia")
    assert len(launch.plan(config, target)) == 8
    for index in range(8):
        (tmp_path / "nvidia" / f"0000:{index}").mkdir(parents=True)
    with pytest.raises(UserError, match="gpus_per_replica: is 0, and there are 8 GPUs here"):
        launch.plan(config, target)
    cpu = configured(kind, model=model, environment=program, replicas=8, env={"CUDA_VISIBLE_DEVICES": ""})
    assert len(launch.plan(cpu, target)) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(launch.plan(config, target)) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(UserError, match="there are 2 GPUs here"):
        launch.plan(config, target)


def test_compilers_of_all_servers_together_fit_the_machine(
    target: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(128))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=400 << 30))
    settings = {"model": {"name": "owner/model"}, "environment": program, "replicas": 8, "gpus_per_replica": 1}
    first, *_ = launch.plan(configured("vllm", **settings), target)
    assert first.env["MAX_JOBS"] == first.env["FLASHINFER_JIT_PREBUILD_MAX_JOBS"] == "6"  # 50 of 8 GiB, eight times
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 << 30))
    assert launch.plan(configured("vllm", **settings), target)[7].env["MAX_JOBS"] == "1"
    assert launch.plan(configured("vllm", **settings, env={"MAX_JOBS": "40"}), target)[0].env["MAX_JOBS"] == "40"
    monkeypatch.setenv("MAX_JOBS", "3")
    assert "MAX_JOBS" not in launch.plan(configured("vllm", **settings), target)[0].env
