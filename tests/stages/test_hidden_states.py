"""extract_hidden_states against servers that fail, die and are killed with the job: every number right, none asked twice."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scripts import extract_hidden_states
from scripts.lib.client.backlog import Backlog
from scripts.lib.client.pool import Pool
from scripts.lib.client.sending import Sender
from scripts.lib.config.file import load_config
from scripts.lib.core import durable, locks
from scripts.lib.core.locks import hold
from scripts.lib.core.provenance import PROJECT
from scripts.lib.engines.base import Reply
from scripts.lib.hidden_states import choice, tensor_file
from scripts.lib.hidden_states.capture import Pass, Piece
from scripts.lib.hidden_states.plan import make_plan
from scripts.lib.hidden_states.store import StateFiles
from scripts.lib.target.model import load_target
from scripts.lib.training.reader import Corpus
from tests.corpora import config as corpus_config
from tests.corpora import corpus, rows_of, sample, shard
from tests.fault_server.answers import HIDDEN_SIZE, LAST, Answers, digest, states_of
from tests.generation import await_progress, generated, kill, servers, target_folder

OUTPUTS = [1, 14, 26]  # of 30 layers: hidden_states 2, 15, 27


class Extraction:
    """A corpus, a configuration and the folder that is filled."""

    def __init__(self, folder: Path, urls: list[str], rows: int = 60, long: int = 0) -> None:
        """`rows` samples of at most 42 tokens and `long` ones of 120."""
        self.folder, self.training, self.output = folder, folder / "training", folder / "states"
        durable.write_json(folder / "model/config.json", {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": 30})
        samples = [sample(number) for number in range(rows)]
        samples += [sample(f"long {number}", input_ids=[7] * 120, loss_mask=[1] * 120) for number in range(long)]
        path = shard(folder / "validated/alpha/000.parquet", samples, load_target(target_folder()).provenance())
        corpus(folder, corpus_config(("alpha",)), [path])
        self.rows = {row.id: row for row in rows_of(self.training)}
        self.urls = urls
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
        durable.write_json(self.folder / "config.json", settings)

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
    with fleet(tmp_path, context_length=100) as both:
        run = Extraction(tmp_path, [server.url for server in both], long=3)
        assert run.finish() == 0
        manifest = run.check()
    assert manifest["totals"] | {"bytes": 0, "tokens": 0} == {
        "chosen": 63, "samples": 60, "failed": 3, "tokens": 0, "bytes": 0,
    }  # fmt: skip
    assert [one["id"] for one in manifest["failed"]] == [
        sample for sample, row in run.rows.items() if len(row.input_ids) > 100
    ]
    assert {one["capture"] for one in manifest["failed"]} == {"layers"}
    assert all("HTTP 400" in one["reason"] for one in manifest["failed"])
    said = capsys.readouterr().err
    assert said.count("warning: no hidden states of sample") == 3
    assert "3 samples failed" in said


def test_an_extraction_that_gets_nothing_fails(tmp_path, capsys):
    with fleet(tmp_path, context_length=100) as both:
        run = Extraction(tmp_path, [server.url for server in both], rows=0, long=4)
        assert run.finish() == 1
    assert not (run.output / "manifest.json").exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: no sample could be captured (4 failed); layers of ")
    assert "HTTP 400" in last


def test_states_of_a_broken_server_are_asked_again(tmp_path):
    """A canary that fails voids what its server has returned since the last good one; the other capture stays."""
    run = Extraction(tmp_path, [], rows=6)
    config = load_config(tmp_path / "config.json")
    plan, target, read = make_plan(config), load_target(target_folder()), Corpus(run.training)
    store = StateFiles(run.output, plan)
    rows = {row.id: row for row in choice.rows(read, run.rows)}
    for row in rows.values():
        states = {c.tensor: np.ones((len(row.input_ids), c.width), np.uint16) for c in plan.captures}
        store.write(row, states, "sglang 1")
    last = plan.captures[1]
    one = Pass(config, target_folder(), target, tmp_path, last, store, partial(choice.rows, read), {}, print)
    got = one.got
    got.done, got.stored = dict.fromkeys(rows, 1), {name: store.find(row) for name, row in rows.items()}
    one.backlog = Backlog(iter(()), lambda: 0.0, 1)
    url = "http://x"
    first, second, *others = rows
    del got.done[second], got.stored[second]
    got.failed = {second: "HTTP 400"}
    # The good canary came after the third reply; the fourth row is another server's.
    arrivals = [*((name, url) for name in others[:3]), (first, url), (second, url), (others[3], "http://y")]
    for name, whose in [*arrivals, ("being read", url)]:
        if got.position == 3:
            one.vouching.passed(url, one.vouching.moment(url))
        one.vouching.arrived(whose)
        got.arrived(name, whose)
    got.reading = {"being read"}
    one.vouching.failed(url)
    assert not one.vouching.doubtful(url)
    assert one.vouching.forget_tainted("being read")
    assert not one.vouching.forget_tainted("being read")
    assert not got.failed
    assert list(got.done) == list(got.stored) == others

    async def left():
        return [(await one.backlog.get()).row.id for _ in range(2)]

    assert sorted(asyncio.run(left())) == sorted([first, second])
    for name in (first, second):
        assert store.find(rows[name]) is None
        assert store.part(rows[name]).keys() == {plan.captures[0].tensor}


def test_a_reply_that_is_being_read_when_its_server_turns_out_broken_is_asked_again(tmp_path, monkeypatch):
    run = Extraction(tmp_path, [], rows=1)
    config = load_config(tmp_path / "config.json")
    plan, read = make_plan(config), Corpus(run.training)
    [row] = choice.rows(read, run.rows)
    layers, store = plan.captures[0], StateFiles(run.output, plan)
    target = load_target(target_folder())
    one = Pass(config, target_folder(), target, tmp_path, layers, store, partial(choice.rows, read), {}, print)
    states = np.ones((len(row.input_ids), layers.width), np.uint16)

    class Wire:
        async def call(self, url, call):
            return Reply(200, {}, b"")

    def keep(kept, request, reply):
        store.write(kept, {layers.tensor: states}, "sglang 1")
        if breaks:
            one.vouching.failed(server.url)

    async def ask_twice():
        nonlocal breaks
        one.pool.admit(server)
        breaks, piece = True, Piece(row)
        assert await one._ask(piece) == 0.0
        assert not one.got.done
        assert not store.part(row)
        breaks = False
        assert await one._ask(piece) is None
        assert one.got.done.keys() == {row.id}
        assert (one.vouching.doubtful(server.url), one.got.reading) == (1, set())
        assert store.part(row).keys() == {layers.tensor}

    one.pool = Pool(1, lambda: 0.0, 1.0, 1.0)
    one.sender = Sender(config.transport, one.pool, Wire())
    one.pool.update([("http://x", 0)])
    server, breaks = one.pool.servers["http://x"], False
    monkeypatch.setattr(one, "_keep", keep)
    asyncio.run(ask_twice())


@pytest.mark.parametrize("during", [12, 30, 75, 105])
def test_killed_and_taken_up_again(tmp_path, during):
    """kill -9 in the first or second pass: what was stored is not asked again."""
    with fleet(tmp_path, tokens_per_second=50, slots=4) as both:
        run = Extraction(tmp_path, [server.url for server in both])
        job = run.start()
        try:
            assert await_progress(job, lambda: generated(both) >= during), (tmp_path / "job.log").read_text()
        finally:
            kill(job)
        assert not (run.output / "manifest.json").exists()
        assert any(run.output.glob("*/*/*.safetensors"))
        whole = {path: path.read_bytes() for path in (run.output / "data").rglob("*.safetensors")}
        assert run.finish() == 0
        run.check()
        assert all(path.read_bytes() == data for path, data in whole.items())
        # What was lost was in flight or not yet on disk: at most one request per place, in each pass.
        assert sum(run.asked(both).values()) <= 120 + 8


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
        monkeypatch.setattr(durable.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        assert run.finish() == 1
        assert [server.count() for server in both] == [0, 0]
    assert "hidden states needs 0.00 GB free" in capsys.readouterr().err


def test_plan_only_tells_the_size(tmp_path, capsys):
    run = Extraction(tmp_path, [])
    plan = ["--config", str(tmp_path / "config.json"), "--training", str(run.training), "--plan"]
    assert extract_hidden_states.main(plan) == 0
    assert "144 bytes a token" in capsys.readouterr().out
    assert not run.output.exists()


def test_two_extractions_at_once_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    run = Extraction(tmp_path, [])
    run.output.mkdir()
    with hold(run.output / ".lock", what="it"):
        assert run.finish() == 1
    assert f"{run.output} is being written by process {os.getpid()} on " in capsys.readouterr().err


def test_an_sglang_without_the_flags_is_refused_before_it_is_started(tmp_path, capsys):
    run = Extraction(tmp_path, [])
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\necho '  --enable-return-hidden-states --disable-radix-cache --chunked-prefill-size'\n"
    )
    python.chmod(0o755)
    settings = durable.read_json(tmp_path / "config.json")
    settings["engine"]["launch"] = {"environment": str(python.parents[1])}
    durable.write_json(tmp_path / "config.json", settings)
    assert run.finish() == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {python}: the installed SGLang does not know --enable-return-aux-hidden-states, "
        "--speculative-algorithm, --return-aux-hidden-state-layer-ids: 0.5.23 does"
    )
    assert not (tmp_path / "state/servers").exists()
