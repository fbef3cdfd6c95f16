"""Configurations and a target folder as tests of launch plans need them."""

from pathlib import Path

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core import durable


def target_of_4096(tmp_path: Path) -> Path:
    durable.write_json(tmp_path / "target" / "target.json", {"context_length": 4096})
    return tmp_path / "target"


def configured(
    kind: str = "llamacpp", model: dict | None = None, served: str | None = None, **launch: object
) -> Config:
    engine = {"kind": kind, "launch": launch, "served_model": served}
    values = {"datasets": {"a": {"class": "B", "source": "a"}}, "engine": engine, "model": model or {}}
    return parse_config(values, "test")
