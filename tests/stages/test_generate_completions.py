"""Stage 2 by its command line: settings, budgets, truncation, broken engines, signals. Faults are in test_generation_faults."""

import re
import signal
import sys
from collections import Counter
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from scripts import generate_completions
from scripts.lib.core.records import read_provenance
from tests.fault_server.answers import Answers
from tests.generation import (
    DATASET,
    SHARD,
    Run,
    answered_whole,
    await_progress,
    generated,
    kill,
    prompts,
    servers,
    target_folder,
)


def here(run: Run, capfd: pytest.CaptureFixture, **options: str) -> tuple[int, str]:
    """Run the job within this process; returns its exit code and what it said."""
    arguments = run.command()[3:]
    for name, value in options.items():
        arguments[arguments.index(f"--{name}") + 1] = value
    code = generate_completions.main(arguments)
    return code, capfd.readouterr().err


def test_conversations_prove_themselves_and_a_deleted_output_asks_for_nothing(tmp_path, capfd):
    with servers(tmp_path, 2, Answers(3), dialect="sglang") as fleet:
        run = Run(tmp_path, prompts(30, turns=3), [s.url for s in fleet], kind="sglang", answers=Answers(3))
        code, said = here(run, capfd)
        assert code == 0, said
        outcomes = run.check()
        assert outcomes.total() == 30
        assert "30 prompts, 0 answered before, 30 left" in said
        provenance = read_provenance(run.output)
        assert provenance["engine"]["kind"] == "sglang"
        assert provenance["engine"]["version"]
        assert provenance["totals"]["outcomes"] == dict(outcomes)
        progress = orjson.loads((tmp_path / "progress.json").read_bytes())
        assert (progress["status"], progress["total"]) == ("done", 30)
        assert progress["completed"] + progress["failed"] == 30

        before = sum(s.stats()["finished"] for s in fleet)
        run.output.unlink()
        code, said = here(run, capfd)
        assert code == 0
        assert "30 answered before, 0 left" in said
        assert run.check() == outcomes
        assert sum(s.stats()["finished"] for s in fleet) == before


def test_other_settings_are_refused_by_name_and_operational_ones_accepted(tmp_path, capfd):
    with servers(tmp_path, 1, Answers(4), dialect="llamacpp") as fleet:
        run = Run(tmp_path, prompts(5), [fleet[0].url], answers=Answers(4))
        assert here(run, capfd)[0] == 0
        run.concurrency = 3
        run.config = {"transport": {"attempts": 9}}
        run.write_config()
        assert here(run, capfd)[0] == 0
        run.max_tokens = 401
        run.write_config()
        code, said = here(run, capfd)
        assert code == 1
        assert said.count("\n") == 1
        assert "max_tokens: 400 -> 401" in said
        run.check()


def test_a_token_budget_is_never_overspent_and_can_be_raised(tmp_path, capfd):
    with servers(tmp_path, 1, Answers(5), dialect="llamacpp") as fleet:
        budget = {"token_budget": 2_000}
        datasets = {DATASET: {"class": "B", "source": "made.jsonl", **budget}}
        run = Run(tmp_path, prompts(40), [fleet[0].url], answers=Answers(5), config={"datasets": datasets})
        code, said = here(run, capfd)
        assert code == 0, said
        rows = run.completions()
        paid = [row for row in rows if row.outcome != "over_budget"]
        spent = sum(len(turn.prompt_ids) + len(turn.output_ids) for row in paid for turn in row.turns)
        # What is left is less than any further prompt may need.
        assert 2_000 - run.max_tokens - 150 < spent <= 2_000
        assert 0 < len(paid) < 40
        reason = next(row.reason for row in rows if row.outcome == "over_budget")
        assert reason == "the budget is used up (dataset 2,000 tokens): raise it and run again"

        budget["token_budget"] = 100_000
        datasets[DATASET].update(budget)
        run.write_config()
        code, said = here(run, capfd)
        assert code == 0
        assert f"{len(paid)} answered before" in said
        assert run.check()["over_budget"] == 0
        times = Counter(line["prompt"] for line in fleet[0].served())
        assert all(times[digest] == 1 for digest in run.digests.values())


@pytest.mark.parametrize("policy", ["retry", "continue"])
def test_truncated_answers_get_more_room(policy, tmp_path, capfd):
    with servers(tmp_path, 1, Answers(6), dialect="llamacpp") as fleet:
        datasets = {
            DATASET: {"class": "B", "source": "x", "truncation": policy, "truncation_max_tokens": 300},
        }
        run = Run(
            tmp_path,
            prompts(20),
            [fleet[0].url],
            max_tokens=30,
            answers=Answers(6),
            config={"datasets": datasets},
        )
        code, said = here(run, capfd)
        assert code == 0, said
        rows = run.completions()
        longer = [row for row in rows if len(row.turns[0].output_ids) > 30]
        assert len(longer) > 3
        for row in rows:
            turn = row.turns[0]
            ids, finish = run.answers(turn.prompt_ids, 30)
            if finish == "length" and policy == "retry":
                ids, finish = run.answers(turn.prompt_ids, 300)
            elif finish == "length":
                rest, finish = run.answers(turn.prompt_ids + ids, 300 - len(ids))
                ids = ids + rest
            assert turn.output_ids == ids
            assert row.outcome == ("ok" if finish == "stop" else "length")


def test_prompts_of_another_target_are_refused(tmp_path, capfd):
    with servers(tmp_path, 1, Answers(1), dialect="llamacpp") as fleet:
        run = Run(tmp_path, prompts(3), [fleet[0].url])
        run.write_prompts({**run.target.provenance(), "template_hash": "of another"})
        code, said = here(run, capfd)
        assert code == 1
        assert f"{run.prompts} was made for another target (template_hash: 'of another' -> " in said
        assert not fleet[0].served()


def test_prompts_of_before_they_held_their_ids(tmp_path, capfd):
    with servers(tmp_path, 1, Answers(1), dialect="llamacpp") as fleet:
        run = Run(tmp_path, prompts(3), [fleet[0].url], answers=Answers(1))
        pq.write_table(pq.read_table(run.prompts).drop_columns(["prompt_ids"]), run.prompts)
        code, said = here(run, capfd)
        assert code == 0, said
        assert run.check() == {"ok": 3}


def test_a_broken_engine_gets_no_prompts(tmp_path, capfd):
    """One of two servers answers with one token for ever: its canary fails, the other one does the work."""
    with servers(tmp_path, 2, Answers(7), dialect="llamacpp", faults=["nan_bang=1", None]) as fleet:
        run = Run(tmp_path, prompts(30), [s.url for s in fleet], answers=Answers(7))
        code, said = here(run, capfd)
        assert code == 0, said
        assert "fails its canary" in said
        run.check()
        assert {turn.endpoint for row in run.completions() for turn in row.turns} == {fleet[1].url}


def kill_after_thirty_answers(run: Run) -> None:
    job = run.start()
    assert await_progress(job, lambda: len(run.journalled()) >= 30)
    job.kill()
    job.wait()


def test_answers_that_a_killed_job_left_unproven_fall_with_a_bad_canary(tmp_path):
    """Nobody knows whether the engine was still well when it gave them."""
    with servers(tmp_path, 2, Answers(9), dialect="llamacpp", tokens_per_second=300) as fleet:
        run = Run(tmp_path, prompts(100), [s.url for s in fleet], concurrency=16, answers=Answers(9))
        kill_after_thirty_answers(run)
        before = run.journalled()
        fleet[0].control(faults={"nan_bang": 1.0})
        assert run.finish() == 0, run.log()
        assert re.search(rf"{fleet[0].url} fails its canary: .*; [1-9]\d* answers since its last good one", run.log())
        assert run.check().total() == 100
        # What a canary had vouched for before the kill stays.
        assert {row.id for row in run.completions() if row.turns[0].endpoint == fleet[0].url} < before


def test_prompts_that_have_left_are_neither_counted_nor_asked_again(tmp_path):
    """Half of the shard leaves after a kill, and the canary of the server that had answered them fails."""
    with servers(tmp_path, 2, Answers(9), dialect="llamacpp", tokens_per_second=300) as fleet:
        run = Run(tmp_path, prompts(100), [s.url for s in fleet], concurrency=16, answers=Answers(9))
        kill_after_thirty_answers(run)
        answered = run.journalled()
        run.rows = [row for row in run.rows if row.id not in answered]
        run.write_prompts(run.target.provenance())
        fleet[0].control(faults={"nan_bang": 1.0})
        assert run.finish() == 0, run.log()
        assert re.search(rf"{fleet[0].url} fails its canary: .*; [1-9]\d* answers since its last good one", run.log())
        assert run.check().total() == len(run.rows)
        progress = orjson.loads((tmp_path / "progress.json").read_bytes())
        assert (progress["total"], progress["resumed"]) == (len(run.rows), 0)
        assert progress["completed"] + progress["failed"] == len(run.rows)


def test_answers_of_an_engine_that_broke_are_asked_again(tmp_path):
    """The engine breaks after a while, silently; what it answered since its last good canary is not believed."""
    with servers(tmp_path, 2, Answers(8), dialect="llamacpp", tokens_per_second=300) as fleet:
        run = Run(tmp_path, prompts(150), [s.url for s in fleet], concurrency=16, answers=Answers(8))
        job = run.start()
        assert await_progress(job, lambda: len(run.journalled()) >= 30)
        fleet[0].control(faults={"nan_bang": 1.0})
        before = run.journalled()
        assert job.wait(120) == 0, run.log()
        assert "fails its canary" in run.log()
        assert run.check().total() == 150
        rows = run.completions()
        assert not [row for row in rows if row.outcome == "repetition"]
        # What a canary has vouched for in time stays.
        assert {row.id for row in rows if row.turns[0].endpoint == fleet[0].url} < before


def test_refusals_of_a_server_that_refuses_everything_are_asked_again_and_its_answers_stay(tmp_path):
    """A broken server, a bad key, an empty balance: HTTP 400 to all prompts, and to the canary."""
    with servers(tmp_path, 2, Answers(8), dialect="llamacpp", tokens_per_second=300) as fleet:
        run = Run(tmp_path, prompts(150), [s.url for s in fleet], concurrency=16, answers=Answers(8))
        job = run.start()
        assert await_progress(job, lambda: len(run.journalled()) >= 30)
        fleet[0].control(faults={"400_overlong_input": 1.0})
        assert job.wait(120) == 0, run.log()
        assert f"{fleet[0].url} refuses its canary: HTTP 400" in run.log()
        outcomes = run.check()
        assert (outcomes.total(), outcomes["prompt_too_long"]) == (150, 0)
        assert max(answered_whole(run, fleet).values()) == 1
        assert {turn.endpoint for row in run.completions() for turn in row.turns} == {s.url for s in fleet}


def test_a_refused_canary_says_nothing_of_what_an_earlier_job_was_answered(tmp_path):
    """A bad key at the second start: nothing that was paid is asked again."""
    with servers(tmp_path, 1, Answers(9), dialect="llamacpp", tokens_per_second=300) as fleet:
        config = {"transport": {"outage_seconds": 1}}
        run = Run(tmp_path, prompts(60), [fleet[0].url], concurrency=16, answers=Answers(9), config=config)
        kill_after_thirty_answers(run)
        fleet[0].control(faults={"400_overlong_input": 1.0})
        assert run.finish() == 1
        assert "refuses its canary: HTTP 400" in run.log()
        safe = run.journalled()
        fleet[0].control(faults={})
        mark = fleet[0].count()
        assert run.finish() == 0, run.log()
        assert run.check().total() == 60
        assert not {line["prompt"] for line in fleet[0].served()[mark:]} & {
            run.digests[prompt_id] for prompt_id in safe
        }


def test_settings_that_every_prompt_is_refused_for_stop_the_job(tmp_path, capfd):
    """The canary has settings of its own, and passes."""
    with servers(tmp_path, 1, Answers(6), dialect="sglang", most_tokens=100) as fleet:
        run = Run(tmp_path, prompts(60), [fleet[0].url], kind="sglang", answers=Answers(6), max_tokens=400)
        code, said = here(run, capfd)
        assert code == 1
        assert "the first 20 prompts were all refused, none was answered: HTTP 400" in said
        assert run.journalled() == set()
        run.rows = run.rows[:5]
        run.write_prompts(run.target.provenance())
        code, said = here(run, capfd)  # so few may be refused for what they are
        assert code == 0, said
        assert Counter(row.outcome for row in run.completions()) == {"rejected": 5}


def test_a_signal_ends_the_job_quickly_and_keeps_what_arrived(tmp_path):
    with servers(tmp_path, 1, Answers(9), dialect="llamacpp", tokens_per_second=200) as fleet:
        run = Run(tmp_path, prompts(80), [fleet[0].url], concurrency=4, answers=Answers(9))
        for number in (signal.SIGTERM, signal.SIGINT):
            before = run.journalled()
            job = run.start()
            assert await_progress(job, lambda: len(run.journalled()) >= len(before) + 3)  # noqa: B023
            job.send_signal(number)
            assert job.wait(30) == 128 + number
            assert not run.output.exists()
            assert run.journalled() > before
            assert orjson.loads((tmp_path / "progress.json").read_bytes())["status"] == "stopped"
        kept = run.journalled()
        fleet[0].control(tokens_per_second=0)
        assert run.finish() == 0, run.log()
        run.check()
        assert f"80 prompts, {len(kept)} answered before" in run.log()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dataset": "other"}, "error: no dataset `other` in the configuration; there are chat, kept"),
        ({"dataset": "kept"}, "error: dataset kept is of class A: its conversations are kept, not answered"),
        ({"prompts": "nowhere.parquet"}, "error: nowhere.parquet: no such file"),
    ],
)
def test_mistakes_are_one_line(change, says, tmp_path, capfd):
    kept = {"kept": {"class": "A", "source": "x"}, DATASET: {"class": "B", "source": "x"}}
    run = Run(tmp_path, prompts(1), ["http://127.0.0.1:9"], config={"datasets": kept})
    code, said = here(run, capfd, **change)
    assert code == 1
    assert said.strip().splitlines()[-1] == says


def test_a_hosted_api_needs_its_key(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    run = Run(
        tmp_path, prompts(1), ["http://127.0.0.1:9/v1"], kind="openai", config={"engine": {"api_key_env": "SOME_KEY"}}
    )
    code, said = here(run, capfd)
    assert code == 1
    assert "the environment variable SOME_KEY is not set" in said


def test_endpoints_that_never_work_end_the_job_with_their_reason(tmp_path, capfd):
    run = Run(tmp_path, prompts(1), ["http://127.0.0.1:9"], config={"transport": {"outage_seconds": 0.2}})
    code, said = here(run, capfd)
    assert code == 1
    assert "no endpoint has worked for" in said
    assert "can't connect" in said
    assert not run.output.exists()
    assert (run.state / "journals" / DATASET / f"{SHARD}.journal").exists()


def test_the_key_is_sent_and_written_nowhere(tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    with servers(tmp_path, 1, Answers(10), dialect="openrouter", target=target_folder()) as fleet:
        run = Run(
            tmp_path,
            prompts(5),
            [fleet[0].url + "/v1"],
            kind="openai",
            answers=Answers(10),
            config={"engine": {"api_key_env": "SOME_KEY"}},
        )
        code, said = here(run, capfd)
        assert code == 0, said
        run.check()
        assert "very-secret" not in said
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or b"very-secret" not in path.read_bytes(), path


def test_of_two_endpoints_one_with_a_used_up_limit_stops_nothing(tmp_path, capfd):
    with servers(tmp_path, 2, Answers(11), dialect="vllm") as fleet:
        urls = [server.url for server in fleet]
        run = Run(tmp_path, prompts(80), urls, kind="vllm", answers=Answers(11))
        fleet[0].control(faults={"429_for_ages": 1.0})
        code, said = here(run, capfd)
        assert code == 0, said
        assert f"{urls[0]} paused until" in said
        assert run.check() == Counter(ok=80)
        fleet[1].control(faults={"429_for_ages": 1.0})
        run.rows += prompts(90)[80:]
        run.write_prompts(run.target.provenance())
        run.output.unlink()
        code, said = here(run, capfd)
        assert code == 1
        assert "its limit resets in 27777:46:39: run again then" in said


def test_a_burst_of_refusals_pauses_a_job_for_as_long_as_the_server_says(tmp_path, capfd):
    """Not for a minute: all but the pause are seconds of work here."""
    with servers(tmp_path, 1, Answers(12), dialect="openrouter", target=target_folder()) as fleet:
        run = Run(tmp_path, prompts(200), [fleet[0].url + "/v1"], kind="openai", answers=Answers(12), concurrency=64)
        job = run.start()
        assert await_progress(job, lambda: len(run.journalled()) >= 20)
        fleet[0].control(faults={"429_soon": 1.0})
        assert await_progress(job, lambda: fleet[0].stats()["injected"].get("429_soon", 0) >= 40)
        fleet[0].control(faults={})
        assert job.wait(40) == 0, run.log()
        assert run.check().total() == 200
        assert "paused until" in run.log()


@pytest.mark.parametrize("second", [300, 5_000], ids=["both short", "one short"])
def test_servers_with_less_room_than_the_model_get_requests_that_fit(second, tmp_path, capfd):
    """Also the first ones, which are made before any server has said how much it holds."""
    with servers(tmp_path, 2, Answers(6), dialect="sglang", context_length=[300, second]) as fleet:
        run = Run(
            tmp_path, prompts(60), [server.url for server in fleet], kind="sglang", answers=Answers(6), concurrency=30
        )
        code, said = here(run, capfd)
        assert code == 0, said
        outcomes = Counter(row.outcome for row in run.completions())
        assert outcomes.keys() <= {"ok", "length"}, outcomes
        assert "HTTP 400" not in said


WATCHED = """
import os, sys
from scripts import generate_completions
from scripts.lib.client.sending import Sender
from scripts.lib.completions.journal import scan
from scripts.lib.completions.journal_records import Done
journal = sys.argv.pop(1)
record, sent = (os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2))
fsync = os.fsync
def watched(file):
    fsync(file)
    if os.readlink(f"/proc/self/fd/{file}") == journal:
        os.write(record, b"%d\\n" % os.fstat(file).st_size)
os.fsync = watched
send = Sender.send
async def noted(self, *arguments):
    os.write(sent, b"%d\\n" % sum(isinstance(line.record, Done) for line in scan(journal)))
    return await send(self, *arguments)
Sender.send = noted
sys.exit(generate_completions.main())
"""


def test_what_was_answered_is_on_the_disk_while_the_job_goes_on(tmp_path):
    """Each answer is in the journal before the next request is sent, and fsynced beside the work, not at the job's end."""
    with servers(tmp_path, 1, Answers(5), dialect="llamacpp", hang_after=20) as fleet:
        run = Run(tmp_path, prompts(40), [fleet[0].url], concurrency=1, answers=Answers(5))
        run.config = {"transport": {"base_seconds": 600, "idle_seconds": 600}}
        run.write_config()
        synced, sent = tmp_path / "synced", tmp_path / "sent"
        watched = [sys.executable, "-c", WATCHED, str(run.journal), str(synced), str(sent)]
        run.command = lambda: [*watched, *Run.command(run)[3:]]
        job = run.start()
        try:
            # One at a time, until the server falls silent; the job waits for it.
            assert await_progress(job, lambda: generated(fleet) == 20, 60)
            assert len(run.journalled()) >= 20 - 2  # but the canary and the last one
            lacking = "what was answered is not fsynced while the job goes on (_keep_saved, Journal.sync)"
            assert await_progress(job, lambda: last(synced) == run.journal.stat().st_size, 60, lacking)
            held = [int(line) for line in sent.read_text().split()]
            assert held == list(range(len(held))), "a request was sent before the answer to the last one was journalled"
        finally:
            kill(job)


def last(sizes: Path) -> int:
    """The size of the journal when it was last synced."""
    lines = sizes.read_text().split() if sizes.exists() else []
    return int(lines[-1]) if lines else 0


def test_an_engine_or_model_changed_in_mid_run_is_refused_by_name_and_rows_name_theirs(tmp_path, capfd):
    """Ten prompts of one model, ten more asked of another: two models in one shard, and nobody could tell which."""
    (tmp_path / "b").mkdir()
    with (
        servers(tmp_path, 1, Answers(6), dialect="sglang") as first,
        servers(tmp_path / "b", 1, Answers(6), dialect="vllm", model="tuned") as second,
    ):
        run = Run(tmp_path, prompts(20)[:10], [first[0].url], kind="sglang", answers=Answers(6))
        assert here(run, capfd)[0] == 0
        assert {(turn.engine, turn.served_model) for row in run.completions() for turn in row.turns} == {
            ("sglang", "target")
        }
        run.rows = prompts(20)
        run.write_prompts(run.target.provenance())
        run.kind, run.urls, run.config = "vllm", [second[0].url], {"engine": {"served_model": "tuned"}}
        run.write_config()
        code, said = here(run, capfd)
        assert code == 1
        assert "engine.kind: 'sglang' -> 'vllm'; engine.served_model: 'target' -> 'tuned'" in said
        assert second[0].count() == 0
        run.kind, run.urls, run.config = "sglang", [first[0].url], {}
        run.write_config()
        assert here(run, capfd)[0] == 0
        assert run.check().total() == 20
