"""Datasets of the Hugging Face Hub: the command line against a server that speaks the Hub's endpoints."""

import io
import json
import os
import subprocess
import sys

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import constants

from scripts import prepare_prompts, prepare_target
from scripts.lib.core.provenance import PROJECT
from scripts.lib.core.waiting import ATTEMPTS
from tests.hub_server import COMMIT, hub_server

CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
  - split: test_sft
    path: data/test_sft-*
---
# Two splits
"""


def parquet(texts):
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": texts, "note": ["x" * 500] * len(texts)}), sink, compression=None)
    return sink.getvalue()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    assert prepare_target.main(["--config", str(PROJECT / "config" / "config.yaml"), "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def hub():
    with hub_server() as hub:
        hub.datasets["someone/chats"] = {
            "README.md": CARD.encode(),
            "data/train_sft-00000-of-00002.parquet": parquet([f"Training question {n}?" for n in range(200)]),
            "data/train_sft-00001-of-00002.parquet": parquet([f"Other question {n}?" for n in range(50)]),
            "data/test_sft-00000-of-00001.parquet": parquet(["Held out?"]),
            "extra/notes.jsonl": b'{"prompt": "From a named file?"}\n',
        }
        yield hub


@pytest.fixture
def arguments(tmp_path, target):
    """The stage's command line for one Hub dataset."""

    def write(source="hf:someone/chats", **keys):
        config = {"datasets": {"a": {"class": "B", "source": source} | keys}, "shards": 1}
        config["lanes"] = {"short": {"max_tokens": 100, "concurrency": 1}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        parts = {
            "--config": tmp_path / "config.yaml",
            "--dataset": "a",
            "--target": target,
            "--output": tmp_path / "out",
        }
        return [str(word) for part in parts.items() for word in part]

    return write


@pytest.fixture
def prepare(tmp_path, hub, arguments, monkeypatch):
    """Run the stage in this process, with what huggingface_hub reads from the environment when it is imported."""

    def run(environment=None, **keys):
        environment = {"HF_ENDPOINT": hub.url} | (environment or {})
        monkeypatch.setattr(constants, "ENDPOINT", environment["HF_ENDPOINT"])
        template = environment["HF_ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", environment.get("HF_HUB_OFFLINE") == "1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if "HF_TOKEN" in environment:
            monkeypatch.setenv("HF_TOKEN", environment["HF_TOKEN"])
        return prepare_prompts.main(arguments(**keys))

    return run


def report(tmp_path):
    return orjson.loads((tmp_path / "out" / "report.json").read_bytes())


def test_command_line_of_a_new_process(tmp_path, hub, arguments):
    """Everything comes from the environment; a token that was stored on disk is not sent."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("stored-on-disk")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.prepare_prompts", *arguments(split="train_sft")],
        env=kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)},
        cwd=PROJECT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert report(tmp_path)["rows"] == 250
    assert {asked[3] for asked in hub.requests} == {None}


def test_split_is_read_and_its_commit_recorded(tmp_path, hub, prepare):
    assert prepare(split="train_sft") == 0
    found = report(tmp_path)
    assert (found["rows"], found["kept"]) == (250, 250)
    assert [source["name"] for source in found["sources"]] == [
        "hf:someone/chats/data/train_sft-00000-of-00002.parquet",
        "hf:someone/chats/data/train_sft-00001-of-00002.parquet",
    ]
    assert {source["revision"] for source in found["sources"]} == {COMMIT}
    assert not hub.asked("GET", "test_sft-00000-of-00001.parquet")


def test_one_file_or_glob_of_a_repository(tmp_path, prepare):
    assert prepare(source="hf:someone/chats/extra/notes.jsonl") == 0
    assert report(tmp_path)["rows"] == 1
    assert prepare(source="hf:someone/chats/data/*_sft-00000-*.parquet") == 0
    assert report(tmp_path)["rows"] == 201
    assert prepare(source="hf:someone/chats/extra") == 0
    assert report(tmp_path)["rows"] == 1
    assert prepare(source="hf:someone/chats/**/*.jsonl") == 0
    assert report(tmp_path)["rows"] == 1


def test_broken_download_goes_on_where_it_stopped(tmp_path, hub, prepare, monkeypatch):
    path = "data/train_sft-00000-of-00002.parquet"
    hub.cut[path] = 2000
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # 10 MB: more than the file has
    assert prepare(split="train_sft") == 0
    assert report(tmp_path)["rows"] == 250
    assert hub.asked("GET", path) == [None, "bytes=2000-"]


def test_cache_serves_the_second_run_and_offline_runs(tmp_path, hub, prepare):
    assert prepare(split="train_sft") == 0
    before = report(tmp_path)
    assert prepare(split="train_sft") == 0
    assert len(hub.asked("GET", ".parquet")) == 2
    hub.requests.clear()
    assert prepare(split="train_sft", environment={"HF_HUB_OFFLINE": "1"}, revision=COMMIT) == 0
    assert hub.requests == []
    after = report(tmp_path)
    assert (after["rows"], after["kept"]) == (before["rows"], before["kept"])
    assert {source["revision"] for source in after["sources"]} == {COMMIT}


def test_a_cache_that_holds_a_part_of_a_split_stops_an_offline_run(hub, prepare, capfd):
    assert prepare(source="hf:someone/chats/data/train_sft-00000-*") == 0
    assert prepare(split="train_sft", environment={"HF_HUB_OFFLINE": "1"}, revision=COMMIT) == 1
    # Without its card, which was not fetched, the names of the files tell the split.
    assert "1 of the 2 files data/train_sft-*-of-00002 are in the cache" in capfd.readouterr().err


def test_token_of_the_environment_opens_a_gated_dataset(tmp_path, hub, prepare, capfd):
    hub.gated["someone/chats"] = "secret-token"
    assert prepare(split="train_sft") == 1
    refused = capfd.readouterr().err
    assert "hf:someone/chats: gated: accept its terms on the Hub and set HF_TOKEN" in refused
    assert prepare(split="train_sft", environment={"HF_TOKEN": "anothers-token"}) == 1
    assert "hf:someone/chats: gated, and HF_TOKEN is refused: accept its terms" in capfd.readouterr().err
    assert prepare(split="train_sft", environment={"HF_TOKEN": "secret-token"}) == 0
    assert "secret-token" not in capfd.readouterr().err + json.dumps(report(tmp_path))


@pytest.mark.parametrize(
    ("status", "headers"), [(503, {}), (429, {"Retry-After": "2"}), (502, {}), (429, {"RateLimit": '"api";r=0;t=3'})]
)
def test_a_busy_hub_is_asked_again_later(tmp_path, hub, prepare, monkeypatch, status, headers):
    slept = []
    monkeypatch.setattr("scripts.lib.core.waiting.time.sleep", slept.append)
    hub.busy = [(status, headers)] * 3
    assert prepare(split="train_sft") == 0
    assert report(tmp_path)["rows"] == 250
    asked = float((headers.get("Retry-After") or headers.get("RateLimit") or "0")[-1])
    assert slept == [max(asked, 1), max(asked, 2), max(asked, 4)]


def test_a_hub_that_stays_busy_ends_the_run_with_one_line(hub, prepare, monkeypatch, capfd):
    monkeypatch.setattr("scripts.lib.core.waiting.time.sleep", lambda seconds: None)
    hub.busy = [(503, {})] * 50
    assert prepare(split="train_sft") == 1
    assert 50 - len(hub.busy) == ATTEMPTS
    assert "error: datasets.a.source: hf:someone/chats: can't be reached" in capfd.readouterr().err


def test_a_token_that_the_hub_does_not_know(hub, prepare, capfd):
    """Sent along it spoils even what is open to everybody."""
    hub.bad_tokens.add("expired")
    assert prepare(split="train_sft", environment={"HF_TOKEN": "expired"}) == 1
    error = capfd.readouterr().err
    assert "hf:someone/chats: HF_TOKEN is refused (HTTP 401): make a new one" in error
    assert "expired" not in error


def test_a_file_that_is_listed_but_missing(hub, prepare, capfd):
    hub.missing.add("data/train_sft-00001-of-00002.parquet")
    assert prepare(split="train_sft") == 1
    error = capfd.readouterr().err
    assert (
        "hf:someone/chats/data/train_sft-00001-of-00002.parquet: missing in the repository, though it lists it" in error
    )
    assert "HF_HUB_OFFLINE" not in error


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "needs `split`: train_sft, test_sft"),
        ({"split": "train"}, "no split `train`; there are train_sft, test_sft"),
        ({"split": "train_sft", "revision": "v9"}, "no revision v9"),
        ({"source": "hf:someone/nothing"}, "no such dataset, or a private one"),
        ({"source": "hf:someone"}, "a Hub dataset is written `hf:owner/name`"),
        ({"source": "hf:someone/chats/no.jsonl"}, "no such file; there are data/train_sft-00000"),
        ({"source": "hf:some one/chats"}, "not a dataset's name"),
        ({"environment": {"HF_HUB_OFFLINE": "1"}}, "is not in the cache, and HF_HUB_OFFLINE is set"),
        ({"environment": {"HF_ENDPOINT": "http://127.0.0.1:9"}}, "can't be reached"),
    ],
)
def test_mistakes_are_one_line(prepare, capfd, monkeypatch, keys, message):
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
    assert prepare(**keys) == 1
    error = capfd.readouterr().err
    assert message in error
    assert error.startswith("error: datasets.a.source")
    assert error.count("\n") == 1
