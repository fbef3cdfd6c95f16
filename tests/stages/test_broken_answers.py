"""Whole jobs against servers whose answers are not what they seem."""

from pathlib import Path

import pytest

from tests.fault_server.answers import Answers
from tests.generation import Run, prompts, servers, target_folder


def test_numbers_that_are_none_are_no_answers(tmp_path: Path) -> None:
    """SGLang writes the stop token where a number broke: asked again, and counted by name."""
    answers = Answers(seed=3)
    with servers(tmp_path, 1, answers, dialect="sglang", faults="nan_stop=0.1") as fleet:
        run = Run(tmp_path, prompts(60), [fleet[0].url], kind="sglang", concurrency=8, answers=answers)
        assert run.finish() == 0, run.log()
        served = fleet[0].served()
    rows = {row.id: row for row in run.completions()}
    broken = [row for row in rows.values() if row.outcome not in ("ok", "length")]
    assert all("NaN happened" in (row.reason or "") and not row.turns for row in broken)
    for prompt in run.rows:
        for turn in rows[prompt.id].turns:
            assert turn.output_ids == run.expected(turn.prompt_ids)
    nan = sum(line["fault"] == "nan_stop" and line["prompt"] in run.digests.values() for line in served)
    assert nan
    assert f"warning: {nan} answers were thrown away: {fleet[0].url}: the engine stopped at 'NaN happened'" in run.log()


@pytest.mark.parametrize("off", [False, True])
def test_what_turns_thinking_off_is_sent(tmp_path: Path, off: bool) -> None:
    """The embedded model's template knows no thoughts: an API that thinks all the same is flagged."""
    run = hosted(tmp_path, **({"extra_body": {"reasoning": {"enabled": False}}} if off else {}))
    with servers(tmp_path, 1, run.answers, dialect="openrouter", target=target_folder(), thinks=1) as fleet:
        run.urls = [f"{fleet[0].url}/v1"]
        run.write_config()
        assert run.finish() == 0, run.log()
    assert set(run.check()) <= {"ok", "length"}
    assert {"reasoning_dropped" in turn.flags for row in run.completions() for turn in row.turns} == {not off}


def hosted(folder: Path, **engine: object) -> Run:
    return Run(folder, prompts(12), ["http://127.0.0.1:9/v1"], kind="openai", config={"engine": engine})


@pytest.mark.parametrize("fault", ["content_parts", "content_stream_parts"])
def test_content_in_parts_is_no_empty_answer(tmp_path: Path, fault: str) -> None:
    """Once asked, once paid."""
    run = hosted(tmp_path)
    with servers(tmp_path, 1, run.answers, dialect="openrouter", target=target_folder(), faults=f"{fault}=1") as fleet:
        run.urls = [f"{fleet[0].url}/v1"]
        run.write_config()
        assert run.finish() == 0, run.log()
        asked = [line["prompt"] for line in fleet[0].served() if line["prompt"] in run.digests.values()]
    assert sorted(asked) == sorted(run.digests.values())
    assert all(turn.reasoning for row in run.completions() for turn in row.turns)


def test_a_cache_smaller_than_the_context_is_said_and_not_exceeded(tmp_path: Path) -> None:
    """SGLang cuts answers short there and calls it `length`."""
    answers = Answers(seed=1, median_tokens=300)
    with servers(tmp_path, 1, answers, dialect="sglang", pool=200, context_length=2048) as fleet:
        run = Run(tmp_path, prompts(10), [fleet[0].url], kind="sglang", answers=answers)
        assert run.finish() == 0, run.log()
    assert "cache holds 200 tokens, less than its context of 2048" in run.log()
    rows = [row for row in run.completions() if row.turns]
    assert any(row.outcome == "length" for row in rows)
    for row in rows:
        (turn,) = row.turns
        assert "short_of_max_tokens" not in turn.flags
        if row.outcome == "length":
            assert len(turn.prompt_ids) + len(turn.output_ids) == 198
