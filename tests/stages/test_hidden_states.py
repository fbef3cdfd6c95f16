"""extract_hidden_states against servers that fail, die and are killed with the job: every number right, none asked twice."""

import contextlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scripts import extract_hidden_states
from scripts.lib import durable
from scripts.lib.hidden_states import tensor_file
from scripts.lib.provenance import PROJECT
from tests.corpora import config as corpus_config
from tests.corpora import corpus, rows_of, sample, shard
from tests.fault_server.answers import HIDDEN_SIZE, LAST, Answers, digest, states_of
from tests.generation import await_progress, kill, servers, target_folder

OUTPUTS = [1, 14, 26]  # of 30 layers: hidden_states 2, 15, 27


class Extraction:
    """A corpus, a configuration and the folder that is filled."""

    def __init__(self, folder: Path, urls: list[str], rows: int = 60, **sections) -> None:
        from scripts.lib.target import load_target

        self.folder, self.training, self.output = folder, folder / "training", folder / "states"
        durable.write_json(folder / "model/config.json", {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": 30})
        samples = [sample(number) for number in range(rows)]
        path = shard(folder / "validated/alpha/000.parquet", samples, load_target(target_folder()).provenance())
        corpus(folder, corpus_config(("alpha",)), [path])
        self.rows = {row.id: row for row in rows_of(self.training)}
        self.urls, self.sections = urls, sections
        self.configure()

    def configure(self, **hidden_states) -> None:
        transport = {"base_seconds": 2, "min_tokens_per_second": 400, "idle_seconds": 3, "ramp_per_second": 1000}
        settings = {
            "model": {"name": str(self.folder / "model")},
            "engine": {"kind": "sglang", "served_model": "target", "endpoints": self.urls},
            "datasets": {"alpha": {"class": "B", "source": "x"}},
            "transport": {**transport, "backoff_first": 0.05, "backoff_cap": 0.5},
            "hidden_states": hidden_states,
        }
        durable.write_json(self.folder / "config.json", settings | self.sections)

    def arguments(self) -> list[str]:
        state, receipt = self.folder / "state", self.folder / "state/hidden_states.json"
        return [
            *("--config", str(self.folder / "config.json"), "--training", str(self.training)),
            *("--target", str(target_folder()), "--output", str(self.output)),
            *("--state", str(state), "--receipt", str(receipt)),
        ]

    def finish(self) -> int:
        return extract_hidden_states.main(self.arguments())

    def start(self) -> subprocess.Popen:
        with open(self.folder / "job.log", "ab") as log:
            command = [sys.executable, "-m", "scripts.extract_hidden_states", *self.arguments()]
            return subprocess.Popen(command, stderr=log, cwd=PROJECT, start_new_session=True)

    def manifest(self) -> dict:
        return durable.read_json(self.output / "manifest.json")

    def check(self, last: bool = True) -> dict:
        """Every file that the manifest lists is whole and holds what the fleet returns for its ids. Returns the manifest."""
        manifest = self.manifest()
        totals = manifest["totals"]
        assert totals["samples"] + totals["failed"] == totals["chosen"]
        assert {one["file"] for one in manifest["files"]} == {
            str(path.relative_to(self.output)) for path in (self.output / "data").rglob("*.safetensors")
        }
        for one in manifest["files"]:
            path, row = self.output / one["file"], self.rows[one["id"]]
            assert (one["sha256"], one["bytes"]) == (durable.sha256_file(path), path.stat().st_size)
            tensors = tensor_file.read(path)[0].tensors
            assert tensors["input_ids"].tolist() == row.input_ids
            assert tensors["loss_mask"].tolist() == row.loss_mask
            assert one["tokens"] == len(row.input_ids)
            expected = {"aux_hidden_state": states_of(row.input_ids, OUTPUTS)}
            if last:
                expected["hidden_state"] = states_of(row.input_ids, [LAST])
            assert tensors.keys() == {"input_ids", "loss_mask", *expected}
            for name, states in expected.items():
                wide = (tensors[name].astype(np.uint32) << 16).view(np.float32)
                assert wide.tolist() == states, (one["id"], name)
        assert not list(self.output.rglob("*.partial"))
        assert not list((self.output / "parts").rglob("*.safetensors")) or totals["failed"]
        return manifest

    def asked(self, fleet) -> Counter[str]:
        """Whole good answers by digest of the ids: rows only, without canaries."""
        known = {digest(row.input_ids) for row in self.rows.values()}
        return Counter(
            line["prompt"]
            for server in fleet
            for line in server.served()
            if line["prompt"] in known and line["delivered"] and line["fault"] in (None, "leading_ws", "usage_missing")
        )


@contextlib.contextmanager
def fleet(folder: Path, **options):
    """A server for the layers and one for the last layer."""
    layers = ",".join(map(str, OUTPUTS))
    with servers(folder, 2, Answers(5), dialect="sglang", layers=[layers, None], last=[None, 1], **options) as both:
        yield both


def test_both_captures_of_every_sample(tmp_path, capsys):
    with fleet(tmp_path) as both:
        run = Extraction(tmp_path, [server.url for server in both])
        assert run.finish() == 0
        manifest = run.check()
        assert manifest["totals"]["samples"] == 60
        assert manifest["layers"]["hidden_states"] == [2, 15, 27]
        assert manifest["layers"]["outputs_of"] == OUTPUTS
        assert manifest["engine"]["versions"] == ["sglang 0.5.23"]
        assert manifest["tensors"]["aux_hidden_state"] == {
            "dtype": "bfloat16",
            "shape": ["tokens", 48],
            "holds": "layers",
        }
        tokens = sum(len(row.input_ids) for row in run.rows.values())
        said = capsys.readouterr().err
        assert f"144 bytes a token x {tokens:,} tokens of 60 samples" in said
        assert said.index("bytes a token") < said.index("capturing")
        assert set(run.asked(both).values()) == {2}
        assert durable.read_json(tmp_path / "state/hidden_states.json")["samples"] == 60

        # Again: all is there, nothing is asked, the same bytes come out.
        before = (run.output / "manifest.json").read_bytes()
        finished = [server.count() for server in both]
        assert run.finish() == 0
        assert [server.count() for server in both] == finished
        assert (run.output / "manifest.json").read_bytes() == before

        # One file harmed: that one is asked again, of both servers.
        victim = run.output / manifest["files"][7]["file"]
        victim.write_bytes(victim.read_bytes()[:-9])
        assert run.finish() == 0
        assert (run.output / "manifest.json").read_bytes() == before
        assert sorted(run.asked(both).values())[-2:] == [2, 4]

        # Fewer samples: the others are set aside, and come back without a request.
        finished = [server.count() for server in both]
        run.configure(max_samples=10)
        assert run.finish() == 0
        assert run.check()["totals"]["samples"] == 10
        run.configure()
        assert run.finish() == 0
        assert (run.output / "manifest.json").read_bytes() == before
        assert [server.count() for server in both] == finished


def test_faults_that_a_resend_cures(tmp_path):
    faults = "curable=0.01,502_html=0.1,429_no_retry_after=0.05"
    with fleet(tmp_path, faults=faults) as both:
        run = Extraction(tmp_path, [server.url for server in both], rows=120)
        assert run.finish() == 0
        assert run.check()["totals"] | {"bytes": 0, "tokens": 0} == {
            "chosen": 120, "samples": 120, "failed": 0, "tokens": 0, "bytes": 0,
        }  # fmt: skip
        assert sum(sum(server.stats()["injected"].values()) for server in both) > 20


def test_what_fails_for_good_is_counted_with_its_reason(tmp_path, capsys):
    with fleet(tmp_path, context_length=20) as both:
        run = Extraction(tmp_path, [server.url for server in both])
        short = {id for id, row in run.rows.items() if len(row.input_ids) < 20}
        # The canary's prompt is longer than this context, so let it be judged by nothing.
        assert 0 < len(short) < 60
        code = run.finish()
    said = capsys.readouterr().err
    assert code == 1
    assert "context of 20 tokens leaves no room" in said
    assert not (run.output / "manifest.json").exists()


@pytest.mark.parametrize("during", [3, 25, 70, 100])
def test_killed_and_taken_up_again(tmp_path, during):
    """kill -9 in the first or second pass: what was stored is not asked again."""
    with fleet(tmp_path, tokens_per_second=50, slots=4) as both:
        run = Extraction(tmp_path, [server.url for server in both])
        job = run.start()
        try:
            stored = lambda: list(run.output.rglob("*/*/*.safetensors"))  # noqa: E731
            count = lambda: sum(run.asked(both).values())  # noqa: E731
            assert await_progress(job, lambda: count() >= during), (tmp_path / "job.log").read_text()
        finally:
            kill(job)
        assert not (run.output / "manifest.json").exists()
        kept, before = len(stored()), run.asked(both)
        assert kept
        whole = {path: path.read_bytes() for path in (run.output / "data").rglob("*.safetensors")}
        assert run.finish() == 0
        run.check()
        assert all(path.read_bytes() == data for path, data in whole.items())
        # What was lost was in flight or not yet on disk: at most one request per place, in each pass.
        assert sum(run.asked(both).values()) <= 120 + 8
        assert sum(before.values()) >= during


def test_servers_without_the_flags_are_refused_before_anything_is_asked(tmp_path, capsys):
    with servers(tmp_path, 1, Answers(5), dialect="sglang", layers="2,15,27") as [other]:
        run = Extraction(tmp_path, [other.url])
        assert run.finish() == 1
        said = capsys.readouterr().err.splitlines()
        assert other.count() == 0
    assert said[-1].startswith(f"error: {other.url}: SGLang 0.5.23 there was not started for this: it needs")
    assert "--return-aux-hidden-state-layer-ids 1 14 26" in said[-1]


def test_the_second_pass_is_checked_before_the_first(tmp_path, capsys):
    with servers(tmp_path, 1, Answers(5), dialect="sglang", layers="1,14,26") as [only]:
        run = Extraction(tmp_path, [only.url])
        assert run.finish() == 1
        assert "--enable-return-hidden-states" in capsys.readouterr().err
        assert only.count() == 0
        run.configure(last=False)
        assert run.finish() == 0
        run.check(last=False)


def test_no_space_is_said_before_anything_is_asked(tmp_path, capsys, monkeypatch):
    with fleet(tmp_path) as both:
        run = Extraction(tmp_path, [server.url for server in both])
        from scripts.lib import durable as module

        class Usage:
            free = 1000

        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: Usage)
        assert run.finish() == 1
        assert [server.count() for server in both] == [0, 0]
    assert "hidden states needs 0.00 GB free" in capsys.readouterr().err


def test_plan_only_tells_the_size(tmp_path, capsys):
    run = Extraction(tmp_path, [])
    plan = ["--config", str(tmp_path / "config.json"), "--training", str(run.training), "--plan"]
    assert extract_hidden_states.main(plan) == 0
    assert "144 bytes a token" in capsys.readouterr().out
    assert not run.output.exists()
    with pytest.raises(SystemExit):
        extract_hidden_states.main(plan[:-1])


def test_two_extractions_at_once_are_refused(tmp_path, capsys):
    import fcntl

    run = Extraction(tmp_path, [])
    run.output.mkdir()
    with open(run.output / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.finish() == 1
    assert "another extraction is writing" in capsys.readouterr().err
