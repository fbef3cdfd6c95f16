"""A hub model's weights are fetched before any server starts, from a server that speaks the Hub's endpoints."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.core.provenance import PROJECT
from tests.hub_server import Hub, hub_server

FETCH = """
import json, sys
from pathlib import Path
from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.engines.weights import fetch_weights
try:
    fetch_weights(parse_config(json.loads(sys.argv[1]), "test"), Path(sys.argv[2]))
except UserError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as hub:
        hub.datasets["owner/model"] = {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "modeling_own.py": b"",
            "model-00001-of-00002.safetensors": b"x" * 1000,
            "model-00002-of-00002.safetensors": b"y" * 1000,
            "pytorch_model.bin": b"z" * 1000,
            "original/consolidated.00.pth": b"p" * 1000,
            "README.md": b"",
        }
        hub.datasets["owner/older"] = {"config.json": b"{}", "pytorch_model.bin": b"z" * 1000}
        yield hub


class Fetch:
    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder, hub

    def __call__(self, name: str, offline: bool = False, **launch: object) -> subprocess.CompletedProcess:
        config = {
            "model": {"name": name},
            "engine": {"kind": "vllm", "launch": launch},
            "datasets": {"d": {"class": "B", "source": "x"}},
        }
        env = os.environ | {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "hf"), "PYTHONPATH": str(PROJECT)}
        env |= {"HF_HUB_OFFLINE": "1"} if offline else {}
        command = [sys.executable, "-c", FETCH, json.dumps(config), str(self.folder / "lock")]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def cached(self) -> set[str]:
        return {path.name for path in (self.folder / "hf").rglob("snapshots/*/**/*") if path.is_file()}


@pytest.fixture
def fetch(tmp_path: Path, hub: Hub) -> Fetch:
    return Fetch(tmp_path, hub)


def test_what_engines_read_is_there_before_they_start(fetch: Fetch, hub: Hub) -> None:
    assert fetch("owner/model").returncode == 0
    weights = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert fetch.cached() == {"config.json", "tokenizer.json", "modeling_own.py"} | weights
    assert len(hub.asked("GET", "model-00001-of-00002.safetensors")) == 1
    assert fetch("owner/model").returncode == 0
    assert len(hub.asked("GET", "model-00001-of-00002.safetensors")) == 1
    hub.requests.clear()
    assert fetch("owner/model", offline=True).returncode == 0
    assert hub.requests == []


def test_weights_of_the_older_kind_are_fetched_where_there_are_no_others(fetch: Fetch) -> None:
    assert fetch("owner/older").returncode == 0
    assert fetch.cached() == {"config.json", "pytorch_model.bin"}


def test_a_download_that_breaks_off_goes_on(fetch: Fetch, hub: Hub) -> None:
    hub.cut["model-00002-of-00002.safetensors"] = 300
    done = fetch("owner/model")
    assert done.returncode == 0, done.stderr
    assert "model-00002-of-00002.safetensors" in fetch.cached()


@pytest.mark.parametrize("flags", [{"load-format": "dummy"}, {"download_dir": "/data"}])
def test_nothing_is_fetched_that_servers_look_for_elsewhere(fetch: Fetch, hub: Hub, flags: dict) -> None:
    assert fetch("owner/model", flags=flags).returncode == 0
    assert hub.requests == []


def test_a_local_model_asks_no_network(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert fetch(str(tmp_path / "weights")).returncode == 0
    assert hub.requests == []


def test_a_model_that_is_not_there_is_one_line(fetch: Fetch) -> None:
    done = fetch("owner/missing")
    assert done.returncode == 1
    assert "error: model `owner/missing`: its files can't be had from the Hugging Face Hub" in done.stderr
    assert "Traceback" not in done.stderr
