"""Generation against servers that misbehave and jobs that are killed: the short form of tests/chaos."""

from pathlib import Path

from tests.fault_server.answers import Answers
from tests.fault_server.faults import CURABLE
from tests.generation import Run, await_progress, faults, generated, kill, kill_and_resume, prompts, servers


def test_kills_among_faults(tmp_path: Path) -> None:
    """200 prompts, three servers with every curable fault, three kills: the corpus is that of a quiet day."""
    rates = faults(dict.fromkeys(CURABLE, 0.005))
    answers = Answers(21)
    with servers(tmp_path, 3, answers, dialect="sglang", tokens_per_second=2_000, faults=rates) as fleet:
        run = Run(
            tmp_path,
            prompts(200),
            [server.url for server in fleet],
            kind="sglang",
            answers=answers,
            config={"transport": {"attempts": 20, "base_seconds": 1, "idle_seconds": 2}},
        )
        kill_and_resume(run, fleet, during=2, finishing=1, seed=5)


def test_second_writer_is_refused(tmp_path: Path) -> None:
    """Two jobs on one shard: the second one says who is at it and leaves; the first one is not disturbed."""
    with servers(tmp_path, 1, Answers(22), dialect="llamacpp", tokens_per_second=1_000) as fleet:
        run = Run(tmp_path, prompts(40), [fleet[0].url], concurrency=4, answers=Answers(22))
        first = run.start()
        try:
            assert await_progress(first, lambda: generated(fleet) >= 1)
            fleet[0].control(hang=True)  # so that the first job is still there
            assert run.finish() == 1
            assert f"being written by process {first.pid} on" in run.log()
            fleet[0].control(hang=False)
            assert first.wait(60) == 0
        finally:
            kill(first)
        assert run.check().total() == 40


def test_turns_survive_kills(tmp_path: Path) -> None:
    """Conversations of three turns: answered turns are kept across a kill, and later prompts contain them verbatim."""
    answers = Answers(23, median_tokens=12, spread=0.4)
    with servers(tmp_path, 1, answers, dialect="sglang", tokens_per_second=400) as fleet:
        run = Run(
            tmp_path,
            prompts(30, turns=3),
            [fleet[0].url],
            kind="sglang",
            concurrency=8,
            answers=answers,
        )
        first = run.start()
        try:
            assert await_progress(first, lambda: generated(fleet) >= 35)
        finally:
            kill(first)
        assert run.finish() == 0, run.log()
        assert run.check() == {"ok": 30}
        assert all(len(row.turns) == 3 for row in run.completions())
        # 90 turns and the canaries; a turn is made again only if it was in flight at the kill.
        assert generated(fleet) <= 90 + run.concurrency + 6
