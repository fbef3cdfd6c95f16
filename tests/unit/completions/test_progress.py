"""Progress: lines, rates of a window, an ETA that isn't fooled by short answers, one file for the run."""

import os
import time
from collections import Counter
from pathlib import Path

import jsonschema
import orjson
import pytest

from scripts.lib.completions import progress
from scripts.lib.completions.progress import Figures, Meter, ProgressFile, line, total_of
from scripts.lib.config.file import parse_config
from scripts.lib.core.records import Message, Prompt, write_rows

ROOT = Path(__file__).resolve().parents[3]


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_line_of_the_issue():
    figures = Figures(
        total=3572,
        completed=2550,
        rate_per_sec=27.0,
        tokens_per_sec=4752,
        avg_output_tokens=176,
        cost_usd=1.02,
        in_flight=1998,
        eta_hours=38 / 3600,
    )
    assert line("chat/000", figures) == (
        "chat/000 2550/3572 ok 2550 err 0 · 27.0/s · 4.8k tok/s · avg 176 tok · $1.02 · 1,998 in flight · eta 0:38"
    )


def test_retries_are_told_apart_from_errors():
    assert "err 2 · " in line("x", Figures(failed=2, retried=980))
    cut = Figures(completed=9, outcomes={"ok": 5, "length": 4})
    assert line("x", cut).startswith("x 9/0 ok 9 err 0 · ")
    assert " · 4 cut · " in line("x", cut)
    assert " · 980 retried · " in line("x", Figures(failed=2, retried=980))


def test_rates_are_those_of_the_window():
    clock = Clock()
    meter = Meter("x", 10_000, clock)
    for _ in range(600):  # ten minutes of one a second, then faster
        clock.now += 1
        meter.add("ok", 10, 100)
        meter.figures("running")
    for _ in range(120):
        clock.now += 1
        for _ in range(5):
            meter.add("ok", 10, 200)
        figures = meter.figures("running")
    assert figures.rate_per_sec == pytest.approx(5, abs=0.1)
    assert figures.tokens_per_sec == pytest.approx(1000, abs=20)
    assert figures.avg_output_tokens == pytest.approx((600 * 100 + 600 * 200) / 1200)


def test_no_eta_until_as_many_have_come_as_are_in_flight():
    """20.3 h at ten answers, 10.9 h at thirty: the first answers are the shortest."""
    clock = Clock()
    meter = Meter("x", 1000, clock)
    meter.in_flight = 128
    for _ in range(127):
        clock.now += 0.1
        meter.add("ok", 10, 20)
    assert meter.figures("running").eta_hours is None
    meter.add("ok", 10, 20)
    assert meter.figures("running").eta_hours > 0


def test_eta_counts_tokens():
    clock = Clock()
    meter = Meter("x", 300, clock)
    for _ in range(100):
        clock.now += 1
        meter.add("ok", 10, 50)
    assert meter.figures("running").eta_hours * 3600 == pytest.approx(200, rel=0.02)


def test_resumed_prompts_count_but_not_for_the_rate():
    clock = Clock()
    meter = Meter("x", 10_000, clock)
    meter.resume(Counter(ok=6400, empty=28), 1000, 2000, 0.5)
    clock.now += 10
    figures = meter.figures("running")
    assert (figures.completed, figures.failed, figures.resumed) == (6400, 28, 6428)
    assert (figures.rate_per_sec, figures.cost_usd) == (0.0, 0.5)


def test_discarded_answers_are_taken_back():
    meter = Meter("x", 10, Clock())
    meter.add("ok", 10, 100)
    meter.remove("ok", 10, 100)
    figures = meter.figures("running")
    assert (figures.completed, figures.total_output_tokens, figures.outcomes) == (0, 0, {})


def test_outcomes_with_an_answer_are_completed_the_others_failed():
    meter = Meter("x", 10, Clock())
    for outcome in ("ok", "length", "reasoning_only", "repetition", "exhausted"):
        meter.add(outcome, 1, 1)
    figures = meter.figures("running")
    assert (figures.completed, figures.failed) == (3, 2)


def test_done_means_no_time_left():
    meter = Meter("x", 1, Clock())
    meter.add("ok", 1, 1)
    assert meter.figures("done").eta_hours == 0.0


# --- the file of the run ---


@pytest.fixture
def run(tmp_path):
    config = parse_config(
        {"shards": 2, "datasets": {name: {"class": "B", "source": "x"} for name in ("a", "b")}}, "test"
    )
    for name in ("a", "b"):
        for shard in ("000", "001"):
            rows = [Prompt(f"{number:032x}", name, "x", "k", [Message("user", "?")]) for number in range(5)]
            write_rows(tmp_path / "prompts" / name / f"{shard}.parquet", Prompt, rows, {})
    return tmp_path, config


def write(run, dataset, shard, figures, age=0.0):
    root, config = run
    file = ProgressFile(root / "state", config, dataset, shard)
    file.write(figures)
    if age:
        values = orjson.loads(file.part.read_bytes())
        values["updated"] -= age
        file.part.write_bytes(orjson.dumps(values))
        file.write_sum()
    return orjson.loads((root / "progress.json").read_bytes())


def test_one_job_at_a_time_speaks_of_the_run(run):
    root, config = run
    first, second = (ProgressFile(root / "state", config, "a", shard) for shard in ("000", "001"))
    running = Figures(total=5, completed=2, status="running")
    first.write(running)
    lock = root / "state" / "progress" / ".lock"
    os.utime(lock, (lock.stat().st_mtime - 60, lock.stat().st_mtime - 60))
    spoken = second.write(running, 30.0)
    assert (spoken.total, spoken.completed) == (20, 4)
    assert first.write(running, 30.0) is None
    assert first.write(Figures(total=5, completed=5, status="done"), 30.0) is None


def test_the_last_job_says_that_the_run_is_done(run):
    root, config = run
    spoken = [
        ProgressFile(root / "state", config, dataset, shard).write(Figures(total=5, completed=5, status="done"), 1e9)
        for dataset in ("a", "b")
        for shard in ("000", "001")
    ]
    assert [run and run.status for run in spoken] == [None, None, None, "done"]


def test_shards_that_have_not_begun_count_with_their_prompts(run):
    whole = write(run, "a", "000", Figures(total=5, completed=2, in_flight=3, rate_per_sec=1, status="running"))
    assert (whole["total"], whole["completed"], whole["in_flight"]) == (20, 2, 3)
    assert whole["status"] == "running"
    assert whole["datasets"]["a"]["total"] == 10
    assert whole["datasets"]["b"]["status"] == "pending"


def test_the_file_is_what_its_schema_says(run):
    whole = write(run, "a", "000", Figures(total=5, completed=2, status="running"))
    schema = orjson.loads((ROOT / "config/progress.schema.json").read_bytes())
    jsonschema.validate(whole, schema)
    for name in [
        "total",
        "completed",
        "failed",
        "rate_per_sec",
        "eta_hours",
        "total_input_tokens",
        "total_output_tokens",
        "avg_output_tokens",
        "elapsed_hours",
        "status",
    ]:
        assert name in whole
        assert name in whole["datasets"]["a"]
    assert schema == orjson.loads(orjson.dumps(progress.schema()))


def test_a_job_that_was_killed_is_not_running(run):
    whole = write(run, "a", "000", Figures(total=5, completed=2, in_flight=3, rate_per_sec=1, status="running"), age=90)
    assert whole["datasets"]["a"]["status"] == "stopped"
    assert (whole["in_flight"], whole["rate_per_sec"], whole["completed"]) == (0, 0, 2)


def test_done_only_when_every_shard_is():
    done, half = Figures(total=5, completed=5, status="done"), Figures(total=5)
    assert total_of([done, done]).status == "done"
    assert total_of([done, half]).status == "running"
    assert total_of([done, Figures(total=5, status="failed")]).status == "failed"
    assert total_of([half, half]).status == "pending"


def test_eta_of_the_run_is_that_of_all_remaining_tokens():
    parts = [
        Figures(total=100, completed=50, total_output_tokens=5000, tokens_per_sec=10, eta_hours=0.1, status="running"),
        Figures(total=100),
    ]
    assert total_of(parts).eta_hours * 3600 == pytest.approx(150 * 100 / 10, rel=0.01)
    parts[0].eta_hours = None
    assert total_of(parts).eta_hours is None


def test_half_a_file_counts_as_none(run):
    root, _ = run
    part = root / "state/progress/a/000.json"
    part.parent.mkdir(parents=True)
    part.write_bytes(b'{"total": 5, "comp')
    whole = write(run, "a", "001", Figures(total=5, completed=5, status="done"))
    assert (whole["total"], whole["completed"]) == (20, 5)
    assert time.time() - whole["updated"] < 60


@pytest.mark.parametrize(
    "left",
    [
        b"", b"{", b"[]", b"null", b"7", b"\xff", b"{}", b'{"updated": null}', b'{"updated": 1, "status": "asleep"}',
        b'{"updated": 1, "total": -1}', b'{"updated": [], "total": 5}', b"\0" * 64,
    ],
)  # fmt: skip
def test_what_cannot_be_read_of_a_part_or_of_uploads_stops_no_job(run, left):
    root, config = run
    file = ProgressFile(root / "state", config, "a", "000")
    file.write(Figures(total=5, completed=2, status="running"))
    for name in ("progress/b/001.json", "uploads.json"):
        path = root / "state" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(left)
    whole = file.gather()
    assert (whole.total, whole.completed, whole.s3_uploaded) == (20, 2, 0)
