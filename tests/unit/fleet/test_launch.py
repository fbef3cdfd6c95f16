"""What servers a configuration asks for, and which GPUs each of them gets."""

from pathlib import Path

import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.fleet.launch import gpu_groups, signature


@pytest.fixture
def target(tmp_path: Path) -> Path:
    durable.write_json(tmp_path / "target" / "target.json", {"context_length": 4096})
    return tmp_path / "target"


def configured(
    kind: str = "llamacpp", model: dict | None = None, served: str | None = None, **launch: object
) -> Config:
    engine = {"kind": kind, "launch": launch, "served_model": served}
    values = {"datasets": {"a": {"class": "B", "source": "a"}}, "engine": engine, "model": model or {}}
    return parse_config(values, "test")


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
