"""Faults of files and masks: resumes that count lines, torn lines, masks that teach the wrong tokens."""

from pathlib import Path

import pytest

from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.completions.journal import scan
from scripts.lib.completions.journal_records import Done
from scripts.lib.config.file import parse_config
from scripts.lib.core.records import Completion, Sample, Turn
from scripts.lib.tokens.completions import from_completion
from scripts.lib.validated.gates import Gates, look
from tests import families
from tests.generation import prompts

IDENTITY = {"sampling": {"temperature": 0.7}}
TARGET = families.target("qwen3-2507-instruct")
CONFIG = parse_config({"datasets": {"chat": {"class": "B", "source": "x"}}}, "test")


def completion(prompt_id: str, number: int) -> Completion:
    turn = Turn([301, 302, number], [400 + number, 401, 151645], "stop", f"answer {number}")
    return Completion(prompt_id, "chat", "ok", turns=[turn])


def answered(folder: Path) -> ShardAnswers:
    return ShardAnswers(folder, "chat", "000", IDENTITY, lambda turn: None)


def journal(folder: Path) -> Path:
    return folder / "journals" / "chat" / "000.journal"


def test_resume_goes_by_id(tmp_path: Path) -> None:
    """Answers arrive in any order; what is asked again are exactly the ids that lack one (DeepSpec issue 35)."""
    ids = [prompt.id for prompt in prompts(40)]
    arrived = [ids[number] for number in (31, 2, 17, 39, 8)]
    first = answered(tmp_path)
    for number, prompt_id in enumerate(arrived):
        first.done(completion(prompt_id, number))
    first.close()
    second = answered(tmp_path)
    try:
        assert [prompt_id for prompt_id in ids if prompt_id in second] == [
            prompt_id for prompt_id in ids if prompt_id in arrived
        ]
        for number, prompt_id in enumerate(arrived):
            found = second.get(prompt_id)
            assert found is not None
            assert found.turns == completion(prompt_id, number).turns
    finally:
        second.close()


def test_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    """A kill in the middle of a write: the records before it stay, and the next one is not glued to its remains."""
    ids = [prompt.id for prompt in prompts(3)]
    first = answered(tmp_path)
    first.done(completion(ids[0], 0))
    whole = journal(tmp_path).stat().st_size
    first.done(completion(ids[1], 1))
    first.close()
    data = journal(tmp_path).read_bytes()
    for length in (*range(whole, len(data), 16), len(data) - 1):
        journal(tmp_path).write_bytes(data[:length])
        resumed = answered(tmp_path)
        assert ids[0] in resumed
        assert ids[1] not in resumed
        resumed.done(completion(ids[2], 2))
        resumed.close()
        records = [line.record for line in scan(journal(tmp_path))]
        assert None not in records
        assert [record.prompt_id for record in records if isinstance(record, Done)] == [ids[0], ids[2]]


def sample(mask: list[int]) -> Sample:
    ids = [301, 302, 303, 400, 401, 151645]
    return Sample("a" * 32, "a" * 32, "chat", ids, mask, "engine", "ok")


@pytest.mark.parametrize(
    ("mask", "check"), [([0] * 6, "no_supervised_tokens"), ([1] * 6, "all_supervised"), ([0, 0, 0, 1, 1, 1], None)]
)
def test_mask_of_zeros_or_ones_is_refused(mask: list[int], check: str | None) -> None:
    """A template without generation tags gives zeros, another tool ones, both in silence (transformers 34494)."""
    gates = Gates(TARGET, CONFIG.validation)
    seen = look(sample(mask))
    assert (gates.checks["no_supervised_tokens"](seen) is not None) == (check == "no_supervised_tokens")
    assert (gates.checks["all_supervised"](seen) is not None) == (check == "all_supervised")


def test_mask_marks_what_was_sampled() -> None:
    """mask[i] is 1 iff the target sampled id i, the stop token included: unshifted (SpecForge issue 885)."""
    turn = Turn([301, 302, 303], [400, 401, 151645], "stop", "answer")
    (made,) = from_completion(Completion("a" * 32, "chat", "ok", turns=[turn]), None, CONFIG.datasets["chat"])
    assert made.input_ids == [301, 302, 303, 400, 401, 151645]
    assert made.loss_mask == [0, 0, 0, 1, 1, 1]
