import functools
import json
import multiprocessing
import subprocess

import pytest
import yaml

from scripts import upload_results
from scripts.lib.completions.progress import ProgressFile
from scripts.lib.config.model import Upload
from scripts.lib.core.errors import UserError
from scripts.lib.exports.upload import LAST_PASSES, LAST_PAUSE, SCAN_SECONDS, Uploader
from scripts.lib.stores import File, TransferError, open_store
from tests.corpora import config, corpus
from tests.faulty_s3 import faulty_s3

STAGES = ["completions", "validated", "training", "exports"]


class Watched:
    """A store that counts what it is given and refuses some keys."""

    batch = 1

    def __init__(self, store):
        self.store, self.url = store, store.url
        self.given: list[str] = []
        self.refused: set[str] = set()
        self.broken = ""  # why nothing at all is taken

    def holds(self, file: File) -> bool:
        if self.broken:
            raise UserError(self.broken)
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
    one = Uploader(results, Upload(target="t", stages=stages), lambda: store, said.append, **options)
    one.said = said
    return one


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


def test_a_target_that_refuses_everything_is_counted_and_told(results, store):
    """Every upload was refused all run long; the counts said that none had failed."""
    (results / "progress.json").write_text('{"total": 5}')
    store.broken = "s3://t: InvalidAccessKeyId: no such key: check it"
    one = uploader(results, store)
    counts = one.once()
    assert (counts.s3_uploaded, counts.s3_failed, counts.planned) == (0, 10, 10)
    assert one.said == [f"upload: {store.broken}; tried again later"]
    assert counts.line("s3://t") == "10 of 10 files are not at s3://t: InvalidAccessKeyId: no such key: check it"
    assert json.loads((results / "progress.json").read_text())["s3_failed"] == 10
    assert json.loads((results / "state/uploads.json").read_text())["reasons"] == {store.broken: 10}
    # What another process can tell from the ledger alone.
    assert store.broken in uploader(results, store).counts().line("s3://t")
    store.broken = ""
    assert one.once().missing == 0
    assert "10 files" in uploader(results, store).counts().line("s3://t")


def test_the_last_pass_waits_for_nothing(results, store):
    """A store that is well again 7 s before the end got none of the files that were waiting for their next attempt."""
    now = [1000.0]
    store.refused = {"parquet", "json", "jsonl"}
    one = uploader(results, store, clock=lambda: now[0])
    for _ in range(4):
        one.once()
        now[0] += 3600
    one.once()
    now[0] += SCAN_SECONDS
    store.refused = set()
    assert one.once().missing == 10
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert one.watch(ended.pid, lambda seconds: None).missing == 0


def test_the_last_passes_try_a_few_times(results, store):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == LAST_PASSES - 1:
            store.refused = set()

    store.refused = {"parquet", "json", "jsonl"}
    assert uploader(results, store).finish(pause).missing == 0
    assert pauses == [LAST_PAUSE] * (LAST_PASSES - 1)
    # No pause cures what people must mend.
    store.broken, pauses[:] = "no such bucket", []
    (results / "completions/alpha/000.parquet").write_text("made anew")
    assert uploader(results, store).finish(pause).missing == 1
    assert pauses == []


def test_stages_do_not_wait_for_each_other(results, store):
    store.refused = {"completions/alpha/000.parquet"}
    counts = uploader(results, store, ["completions", "training"]).once()
    assert (counts.s3_failed, counts.missing) == (1, 1)
    assert store.given[-1] == "training/manifest.json"


def test_a_damaged_corpus_holds_up_nothing_else(results, store):
    manifest = results / "training/manifest.json"
    manifest.write_text("{}")
    counts = uploader(results, store, ["training", "completions"]).once()
    assert store.given == ["completions/alpha/000.parquet"]
    assert (counts.planned, counts.missing, counts.s3_failed) == (2, 1, 1)
    assert f"{manifest.resolve()}: has schema version None" in counts.line("t")


def test_an_unreadable_ledger_is_made_anew(results, store):
    uploader(results, store).once()
    store.given.clear()
    ledger = sorted((results / "state/uploads").glob("*.json"))
    for path, text in zip(ledger, ["", "[]", "{", '{"unknown": 1}', "\x00"]):
        path.write_text(text)
    assert uploader(results, store).once().missing == 0
    assert store.given == []


def test_renewed_credentials_are_read_in_mid_run(results, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def renew(key):
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    with faulty_s3() as server:
        settings = Upload(target="s3://corpora/run", endpoint_url=server.url, region="us-east-1", stages=STAGES)
        said = []
        one = Uploader(results, settings, lambda: open_store(settings.target, settings), said.append)
        renew("OLD")
        server.keys = {"OLD"}
        assert one.once().missing == 0
        server.keys = {"NEW"}
        (results / "completions/alpha/000.parquet").write_text("made anew")
        refused = one.once()
        assert refused.missing == 1
        assert "InvalidAccessKeyId: told: InvalidAccessKeyId: check AWS_ACCESS_KEY_ID" in refused.line("t")
        renew("NEW")
        assert one.once().missing == 0
        assert server.objects["/corpora/run/completions/alpha/000.parquet"][0] == b"made anew"
        # Rewritten at the very moment of the pass: the same pass tries again.
        (results / "completions/alpha/000.parquet").write_text("once more")
        server.keys = {"NEWEST"}
        stores = iter([lambda: None, lambda: renew("NEWEST")])

        def opened():
            next(stores)()
            return open_store(settings.target, settings)

        assert Uploader(results, settings, opened, said.append).once().missing == 0


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
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"upload: {tmp_path}/target: 4 files, ")
    assert (tmp_path / "target/training/manifest.json").exists()
    config.write_text(yaml.safe_dump(settings | {"upload": {}}))
    assert upload_results.main(["--config", str(config), "--results", str(results)]) == 1
    assert "upload.target is not set" in capsys.readouterr().err


def test_the_end_of_a_run_is_told_in_a_line(results, tmp_path, capsys):
    target = tmp_path / "target"
    settings = {"datasets": {"alpha": {"class": "B", "source": "x"}}, "upload": {"target": str(target)}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    arguments = ["--config", str(config), "--results", str(results)]
    target.write_text("a file where a folder should be")
    assert upload_results.main([*arguments, "--tell"]) == 0
    told = capsys.readouterr().err
    assert told == (
        f"upload: 4 of 4 files are not at {target}: they come after files that failed: "
        "`snakemake --cores 1 upload_results` sends them\n"
    )
    target.unlink()
    assert upload_results.main([*arguments, "--brief"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert upload_results.main([*arguments, "--tell"]) == 0
    assert capsys.readouterr().err == ""
    assert upload_results.main([*arguments, "--brief"]) == 0
    assert capsys.readouterr().err.startswith(f"upload: {target}: 4 files, ")


def test_parts_that_arrived_before_the_credentials_expired_are_not_sent_again(results, store):
    """A token of an hour ends in the middle of a file of 150 GB (aws-cli issue 4562)."""
    begun = []

    def put(files):
        (file,) = files
        begun.append(dict(file.memory))
        file.memory["upload_id"] = "u"
        file.save()
        raise UserError("s3://t: ExpiredToken: renew it")

    real, store.store.put = store.store.put, put
    one = uploader(results, store, ["completions"])
    assert one.once().missing == 1
    assert begun == [{}, {"upload_id": "u"}]
    store.store.put = lambda files: (begun.append(dict(files[0].memory)), real(files))
    assert uploader(results, store, ["completions"]).once().missing == 0
    assert begun[-1] == {"upload_id": "u"}


def test_another_server_with_the_same_bucket_gets_everything(results, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with faulty_s3() as old, faulty_s3() as new:
        for server in (old, new):
            settings = Upload(target="s3://corpora/run", endpoint_url=server.url, region="us-east-1", stages=STAGES)
            opened = functools.partial(open_store, settings.target, settings)
            assert Uploader(results, settings, opened, lambda line: None).once().missing == 0
        assert old.objects.keys() == new.objects.keys()
        assert len(new.objects) == 10


@pytest.mark.parametrize("target", ["s3://", "nonsense://x", "ftp://127.0.0.1:1/x"])
def test_impossible_targets(target):
    with pytest.raises(UserError, match=target):
        open_store(target)
