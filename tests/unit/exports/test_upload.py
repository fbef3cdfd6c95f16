import json
import multiprocessing
import subprocess

import pytest
import yaml

from scripts import upload_results
from scripts.lib.completions.progress import ProgressFile
from scripts.lib.config.model import Upload
from scripts.lib.core.errors import UserError
from scripts.lib.exports.upload import SCAN_SECONDS, Uploader
from scripts.lib.stores import File, TransferError, open_store
from tests.corpora import config, corpus

STAGES = ["completions", "validated", "training", "exports"]


class Watched:
    """A store that counts what it is given and refuses some keys."""

    batch = 1

    def __init__(self, store):
        self.store, self.url = store, store.url
        self.given: list[str] = []
        self.refused: set[str] = set()

    def holds(self, file: File) -> bool:
        return self.store.holds(file)

    def put(self, files):
        for file in files:
            if any(file.key.endswith(name) for name in self.refused):
                raise TransferError(f"{file.key}: the line is down")
            self.given.append(file.key)
        self.store.put(files)


@pytest.fixture
def results(tmp_path):
    """A results folder with something finished in every stage, and something unfinished in each."""
    folder = tmp_path / "results"
    corpus(folder)
    (folder / "exports/tokens/data").mkdir(parents=True)
    (folder / "completions/alpha").mkdir(parents=True)
    for name in ("completions/alpha/000.parquet", "exports/tokens/data/00000.jsonl", "exports/tokens/export.json"):
        (folder / name).write_text(name)
    for name in ("completions/alpha/.001.parquet.7.partial", "exports/.eagle.partial/data/00000.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("unfinished")
    return folder


@pytest.fixture
def store(tmp_path):
    return Watched(open_store(str(tmp_path / "target")))


def uploader(results, store, stages=STAGES, **options):
    said: list[str] = []
    return Uploader(results, Upload(target="t", stages=stages), store, said.append, **options)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_finished_arrives(results, store, tmp_path):
    counts = uploader(results, store).once()
    there = tree(tmp_path / "target")
    version = (results / "training").resolve().name
    expected = tree(results / "completions") | tree(results / "exports")
    assert {name for name in there if name.startswith("training/")} == {
        "training/manifest.json", f"training/{version}/manifest.json", f"training/{version}/part-00000.parquet",
    }  # fmt: skip
    assert there[f"training/{version}/part-00000.parquet"] == (results / "training/part-00000.parquet").read_bytes()
    assert {name for name in there if name.startswith("validated/")} == {
        f"validated/{dataset}/{shard}.parquet" for dataset in ("alpha", "beta") for shard in ("000", "001")
    }
    assert b"unfinished" not in there.values()
    assert len([name for name in there if name.startswith(("completions", "exports"))]) == len(expected) - 2
    assert (counts.s3_uploaded, counts.s3_failed) == (len(there), 0)
    assert counts.s3_bytes == sum(map(len, there.values()))
    assert json.loads((results / "state/uploads.json").read_text())["s3_uploaded"] == len(there)


def test_hidden_states_go_before_their_manifest(results, store):
    for name in ("data/ab/ab1.safetensors", "data/ab/.ab2.safetensors.7.partial", "parts/cd/cd1.safetensors", ".lock"):
        (results / "hidden_states" / name).parent.mkdir(parents=True, exist_ok=True)
        (results / "hidden_states" / name).write_text("states")
    (results / "hidden_states/manifest.json").write_text("{}")
    uploader(results, store, stages=["hidden_states"]).once()
    assert store.given == ["hidden_states/data/ab/ab1.safetensors", "hidden_states/manifest.json"]


def test_a_second_pass_sends_only_what_changed(results, store):
    uploader(results, store).once()
    store.given.clear()
    uploader(results, store).once()
    assert store.given == []
    (results / "completions/alpha/000.parquet").write_text("made anew")
    uploader(results, store).once()
    assert store.given == ["completions/alpha/000.parquet"]


def test_a_lost_ledger_sends_nothing_twice(results, store):
    uploader(results, store).once()
    for path in (results / "state/uploads").iterdir():
        path.unlink()
    store.given.clear()
    assert uploader(results, store).once().s3_uploaded == 10
    assert store.given == []


def test_a_manifest_never_comes_before_its_parts(results, store):
    store.refused = {"part-00000.parquet"}
    counts = uploader(results, store, ["training"]).once()
    assert store.given == []
    assert (counts.s3_failed, counts.s3_uploaded) == (1, 0)
    store.refused = set()
    uploader(results, store, ["training"]).once(hurry=True)
    assert [key.rpartition("/")[2] for key in store.given] == ["part-00000.parquet", "manifest.json", "manifest.json"]


def test_failures_wait_longer_each_time_and_hold_nothing_else_up(results, store):
    now = [1000.0]
    store.refused = {"beta/000.parquet"}
    one = uploader(results, store, ["validated"], clock=lambda: now[0])
    counts = one.once()
    assert (counts.s3_uploaded, counts.s3_failed) == (3, 1)
    assert counts.errors == {"validated/beta/000.parquet": "validated/beta/000.parquet: the line is down"}
    store.refused = set()
    now[0] += SCAN_SECONDS
    assert one.once().s3_failed == 1  # not yet
    now[0] += SCAN_SECONDS
    assert one.once().s3_failed == 0
    assert store.given[-1] == "validated/beta/000.parquet"


def test_a_file_that_disappears_is_no_failure(results, store):
    real = store.store.put

    def put(files):
        (results / "completions/alpha/000.parquet").unlink()
        real(files)

    store.store.put = put
    counts = uploader(results, store, ["completions"]).once()
    assert (counts.s3_uploaded, counts.s3_failed) == (0, 0)


def test_two_uploaders_send_each_file_once(results, store):
    log = results / "given"
    real = store.store.put

    def put(files):
        with open(log, "a") as file:
            file.write("".join(f"{one.key}\n" for one in files))
        real(files)

    store.store.put = put
    processes = [multiprocessing.get_context("fork").Process(target=uploader(results, store).once) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    given = log.read_text().split()
    assert len(given) == len(set(given)) == 10


def test_watching_ends_with_the_run_and_sees_its_last_file(results, store):
    run = subprocess.Popen(["sleep", "60"])
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        (results / f"completions/alpha/{len(pauses):03d}.parquet").write_text("new")
        if len(pauses) == 2:
            run.kill()
            run.wait()

    uploader(results, store, ["completions"]).watch(run.pid, pause)
    assert sorted(store.given) == [f"completions/alpha/{number:03d}.parquet" for number in range(3)]
    assert pauses == [SCAN_SECONDS] * 2


def test_counts_reach_progress_json(results, store):
    (results / "progress.json").write_text('{"total": 5}')
    counts = uploader(results, store).once()
    progress = json.loads((results / "progress.json").read_text())
    told = {"s3_uploaded": 10, "s3_bytes": counts.s3_bytes, "s3_failed": 0}
    assert progress == {"total": 5} | told
    # Jobs that go on adding up their own progress tell the same.
    gathered = ProgressFile(results / "state", config(), "alpha", "000").gather().model_dump()
    assert {name: gathered[name] for name in told} == told


def test_the_command_line(results, tmp_path, capsys):
    settings = {"datasets": {"alpha": {"class": "B", "source": "x"}}, "upload": {"target": str(tmp_path / "target")}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert upload_results.main(["--config", str(config), "--results", str(results)]) == 0
    assert "4 files" in capsys.readouterr().err
    assert (tmp_path / "target/training/manifest.json").exists()
    config.write_text(yaml.safe_dump(settings | {"upload": {}}))
    assert upload_results.main(["--config", str(config), "--results", str(results)]) == 1
    assert "upload.target is not set" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["s3://", "nonsense://x"])
def test_impossible_targets(target):
    with pytest.raises(UserError, match=target):
        open_store(target)
