"""A model that answers whatever it is told to, in the shape of its family, and what must hold of the samples."""

import itertools
from collections.abc import Sequence

from scripts.lib.config.model import Dataset
from scripts.lib.core.records import Completion, Message, Sample, Turn
from scripts.lib.target.model import Target
from scripts.lib.target.output import split_output
from scripts.lib.tokens.completions import from_completion
from tests.families import FAMILIES, target

DATASET = Dataset(data_class="B", source="x")
ID = "0123456789abcdef" * 2


def said(name: str, content: Sequence[int], thought: Sequence[int] | None = None) -> list[int]:
    """The ids of an answer of a family, written as its model writes it."""
    family, model = FAMILIES[name], target(name)
    if thought is None or family.written is None:
        before, after = family.written_plain.split("{content}")
        return [*model.encode(before), *content, *model.encode(after)]
    before, rest = family.written.split("{thought}")
    between, after = rest.split("{content}")
    return [*model.encode(before), *thought, *model.encode(between), *content, *model.encode(after)]


def converse(model: Target, users: Sequence[str], outputs: Sequence[Sequence[int]], system: str | None = None):
    """A completion whose turns answer `users` with `outputs`, the history rendered as stage 2 does."""
    messages = [] if system is None else [Message("system", system)]
    turns = []
    for user, output in zip(users, outputs):
        messages.append(Message("user", user))
        prompt = model.render(messages)
        split = split_output(model, prompt, output)
        stopped = bool(output) and output[-1] in model.eos_ids
        turns.append(Turn(prompt, list(output), "stop" if stopped else "length", split.content, split.reasoning))
        messages.append(Message("assistant", split.content, split.reasoning))
    return Completion(ID, "d", "ok", messages=messages, turns=turns)


def samples_of(completion: Completion) -> list[Sample]:
    return from_completion(completion, None, DATASET)


def assert_exact(model: Target, turns: Sequence[Turn], samples: Sequence[Sample]) -> None:
    """Each turn is in one sample, as what was sent and what was sampled; only what was sampled is supervised."""
    left = list(turns)
    for sample in samples:
        assert len(sample.input_ids) == len(sample.loss_mask)
        expected = [0] * len(sample.input_ids)
        inside = []
        while left and sample.input_ids[: len(left[0].prompt_ids + left[0].output_ids)] == (
            left[0].prompt_ids + left[0].output_ids
        ):
            turn = left.pop(0)
            start = len(turn.prompt_ids)
            expected[start : start + len(turn.output_ids)] = [1] * len(turn.output_ids)
            inside.append(turn)
        assert inside, "the sample starts with no turn's prompt and output"
        assert sample.input_ids == inside[-1].prompt_ids + inside[-1].output_ids
        assert sample.loss_mask == expected
        assert spans_text(model, sample) == "".join(model.decode(turn.output_ids) for turn in inside)
    assert not left, f"{len(left)} turns are in no sample"


def spans_text(model: Target, sample: Sample) -> str:
    """The decoded supervised spans, one after the other."""
    runs = itertools.groupby(zip(sample.input_ids, sample.loss_mask), key=lambda pair: pair[1])
    return "".join(model.decode([token for token, _ in run]) for mask, run in runs if mask)
