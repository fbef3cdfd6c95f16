"""Stage 3 of class B: what the target answered becomes training samples.

A sample's ids are the prompt's followed by the answer's, and its mask is 1 on the answer's only. Ids that an engine
sampled are taken verbatim: nothing here decodes and encodes again. For example, `[7, 8]` answered with `[9, 2]` is
`input_ids [7, 8, 9, 2]`, `loss_mask [0, 0, 1, 1]`; when the next prompt is `[7, 8, 9, 2, 5, 8]` and its answer
`[6, 2]`, the same sample goes on: `[7, 8, 9, 2, 5, 8, 6, 2]`, `[0, 0, 1, 1, 0, 0, 1, 1]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.config.model import Config, Dataset
from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import POLICIES, Completion, Message, Sample, Turn
from scripts.lib.target.model import Target
from scripts.lib.target.thoughts import looks_like_thought
from scripts.lib.tokens.provenance import provenance_of


@dataclass(slots=True)
class _Growing:
    """A sample under construction: the turns that merged so far."""

    ids: list[int]
    mask: list[int]
    turns: list[int]  # their numbers in the completion
    flags: set[str] = field(default_factory=set)


def from_completion(
    completion: Completion, tools: str | None, dataset: Dataset, template_kwargs: str | None = None
) -> list[Sample]:
    """Samples of a completion: one for all turns that merge, else one per turn.

    A turn merges into the sample before it only if its prompt literally starts with that sample's ids: the template's
    glue in between (a line break, the next user turn) is then masked, and every id stays what the engine saw or said.
    Templates that drop earlier thoughts from the history break that, and get one sample per turn.
    """
    growing: list[_Growing] = []
    for number in kept_turns(completion, dataset):
        turn = completion.turns[number]
        last = growing[-1] if growing else None
        mergeable = (
            last is not None
            and last.turns[-1] == number - 1
            and completion.turns[number - 1].ids_origin == turn.ids_origin
            and turn.prompt_ids[: len(last.ids)] == last.ids
        )
        if not mergeable:
            last = _Growing(list(turn.prompt_ids), [0] * len(turn.prompt_ids), [])
            growing.append(last)
        assert last is not None
        last.mask += [0] * (len(turn.prompt_ids) - len(last.ids))
        last.ids = turn.prompt_ids + turn.output_ids
        last.mask += [1] * len(turn.output_ids)
        last.turns.append(number)
        last.flags |= turn_flags(turn)
    return [_finished(completion, tools, template_kwargs, sample, len(growing) > 1) for sample in growing]


def kept_turns(completion: Completion, dataset: Dataset) -> list[int]:
    """Numbers of the turns that become samples under the dataset's policies."""
    return [
        number
        for number, turn in enumerate(completion.turns)
        if not any(getattr(dataset, POLICIES[outcome]) == "drop" for outcome in turn_outcomes(turn))
    ]


def turn_outcomes(turn: Turn) -> list[str]:
    """What is not plainly `ok` about an answer: `length`, `reasoning_only`, or both."""
    outcomes = []
    if turn.finish_reason == "length":
        outcomes.append("length")
    if turn.reasoning is not None and not turn.text.strip():
        outcomes.append("reasoning_only")
    return outcomes


def turn_flags(turn: Turn) -> set[str]:
    """The turn's flags, complete whatever the engine's adapter set itself."""
    flags = set(turn.flags)
    if turn.eos_appended:
        flags.add("eos_appended")
    if turn.finish_reason == "length":
        flags.add("truncated")
    if "reasoning_only" in turn_outcomes(turn):
        flags.add("reasoning_only")
    if turn.reasoning is None and looks_like_thought(turn.content or ""):
        flags.add("thought_in_text")
    return flags


def _finished(
    completion: Completion, tools: str | None, template_kwargs: str | None, sample: _Growing, several: bool
) -> Sample:
    last = sample.turns[-1]
    turn = completion.turns[last]
    return Sample(
        id=f"{completion.id}/{last}" if several else completion.id,
        prompt_id=completion.id,
        dataset=completion.dataset,
        input_ids=sample.ids,
        loss_mask=sample.mask,
        ids_origin=turn.ids_origin,
        outcome=next(iter(turn_outcomes(turn)), "ok"),
        messages=_until_answer(completion.messages, last),
        tools=tools,
        flags=sorted(sample.flags),
        template_kwargs=template_kwargs,
    )


def _until_answer(messages: list[Message], number: int) -> list[Message]:
    """The conversation up to and including its answer `number` (from 0)."""
    answers = [position for position, message in enumerate(messages) if message.role == "assistant"]
    return messages[: answers[number] + 1] if number < len(answers) else messages


def tokenize_completions(
    config: Config, dataset: str, target: Target, prompts: Path, completions: Path, output: Path
) -> dict[str, int]:
    """Turn a shard of completions into a shard of samples. Returns counts.

    Raises UserError when a prompt has no outcome or two, or an outcome has no prompt: nothing may be lost here.
    """
    settings = config.datasets[dataset]
    asked = _rendered_with(prompts)
    counts = {"prompts": len(asked), "samples": 0}
    seen: set[str] = set()

    def samples() -> Iterator[Sample]:
        for completion in records.read_rows(completions, Completion):
            if completion.id not in asked:
                raise UserError(f"{completions}: {completion.id} is not a prompt of {prompts}: delete it and run again")
            if completion.id in seen:
                raise UserError(f"{completions}: {completion.id} has two outcomes: delete it and run again")
            seen.add(completion.id)
            tools, template_kwargs = asked[completion.id]
            yield from from_completion(completion, tools, settings, template_kwargs)
        missing = asked.keys() - seen
        if missing:
            raise UserError(
                f"{completions}: {len(missing)} prompts of {prompts} have no outcome, such as {min(missing)}: "
                "delete it and run again"
            )

    counts["samples"] = records.write_rows(
        output, Sample, samples(), provenance_of(config, dataset, target, prompts, completions)
    )
    return counts


def _rendered_with(prompts: Path) -> dict[str, tuple[str | None, str | None]]:
    """Prompt id -> (tools, template variables) of a shard of prompts, be it of before there were such variables."""
    with records.open_parquet(prompts) as file:
        names = [name for name in ("id", "tools", "template_kwargs") if name in file.schema_arrow.names]
    rows = records.read_columns(prompts, names)
    return {prompt_id: (tools, kwargs[0] if kwargs else None) for prompt_id, tools, *kwargs in rows}
