"""Stage 3: completions (class B) and ready conversations (class A) become training samples.

A sample's ids are the prompt's followed by the answer's, and its mask is 1 on the answer's only. Ids that an engine
sampled are taken verbatim: nothing here decodes and encodes again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.config.model import Config, Dataset
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import code_version
from scripts.lib.core.records import POLICIES, Completion, Message, Prompt, Sample, Turn
from scripts.lib.target import turn_format
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.target.output import with_split_thought

ROWS_AT_ONCE = 256


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
        if not any(getattr(dataset, policy) == "drop" for policy in map(POLICIES.get, turn_outcomes(turn)))
    ]


def turn_outcomes(turn: Turn) -> list[str]:
    """What is not plainly `ok` about an answer: `length`, `reasoning_only`, or both."""
    outcomes = []
    if turn.finish_reason == "length":
        outcomes.append("length")
    if turn.reasoning is not None and not turn.content.strip():
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
        output, Sample, samples(), _provenance(config, dataset, target, prompts, completions)
    )
    return counts


def _rendered_with(prompts: Path) -> dict[str, tuple[str | None, str | None]]:
    """Prompt id -> (tools, template variables) of a shard of prompts, be it of before there were such variables."""
    with records.open_parquet(prompts) as file:
        names = [name for name in ("id", "tools", "template_kwargs") if name in file.schema_arrow.names]
    rows = records.read_columns(prompts, names)
    return {prompt_id: (tools, kwargs[0] if kwargs else None) for prompt_id, tools, *kwargs in rows}


def _provenance(config: Config, dataset: str, target: Target, *inputs: Path) -> dict:
    """What these samples were made from: the provenance of every input is carried along."""
    return {
        "stage": "tokens",
        "settings": stage_settings(config, "tokens", dataset),
        "target": target.provenance(),
        "code": code_version(),
        "inputs": [records.read_provenance(path) for path in inputs],
    }


def tokenize_conversations(config: Config, dataset: str, target: Target, prompts: Path, output: Path) -> dict[str, int]:
    """Turn a shard of ready conversations or ready tokens (class A) into a shard of samples. Returns counts."""
    counts = {"prompts": 0, "samples": 0}

    def samples() -> Iterator[Sample]:
        for batch in _batches(records.read_rows(prompts, Prompt)):
            counts["prompts"] += len(batch)
            yield from from_conversations(target, batch)

    counts["samples"] = records.write_rows(output, Sample, samples(), _provenance(config, dataset, target, prompts))
    return counts


def from_conversations(target: Target, prompts: list[Prompt]) -> Iterator[Sample]:
    """Samples of class-A prompts: ready tokens as they are, conversations rendered with every assistant turn supervised.

    A turn that the chat template refuses gives a sample without ids and the flag `template_error`, which validation
    rejects and counts.
    """
    drafts = [(prompt, draft, several) for prompt in prompts for draft, several in _drafts(target, prompt)]
    texts = [text for _, draft, _ in drafts for text, _ in draft.pieces]
    encoded = iter(target.encode_batch(texts))
    for prompt, draft, several in drafts:
        if prompt.input_ids is not None:
            yield _ready(prompt)
            continue
        ids: list[int] = []
        mask: list[int] = []
        for _, supervised in draft.pieces:
            piece = next(encoded)
            ids += piece
            mask += [supervised] * len(piece)
        yield Sample(
            id=f"{prompt.id}/{draft.turn}" if several else prompt.id,
            prompt_id=prompt.id,
            dataset=prompt.dataset,
            input_ids=ids,
            loss_mask=mask,
            ids_origin="rendered",
            outcome="kept",
            messages=draft.messages,
            tools=prompt.tools,
            flags=sorted(draft.flags),
            template_kwargs=prompt.template_kwargs,
        )


@dataclass(slots=True)
class _Draft:
    """A class-A sample before its texts are tokenized. Pieces are encoded apart: `(text, mask)`."""

    pieces: list[tuple[str, int]] = field(default_factory=list)
    text: str = ""  # of all pieces
    turn: int = 0
    messages: list[Message] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)


def _drafts(target: Target, prompt: Prompt) -> list[tuple[_Draft, bool]]:
    """The drafts of a prompt, each with whether there are several."""
    if prompt.input_ids is not None:
        return [(_Draft(), False)]
    try:
        messages = [with_split_thought(target, message) for message in prompt.messages]
        drafts = _rendered(target, messages, prompt.tools, prompt.template_kwargs)
    except ValueError:  # TemplateError, NotWritable
        drafts = [_Draft(messages=prompt.messages, flags={"template_error"})]
    return [(draft, len(drafts) > 1) for draft in drafts]


def _rendered(
    target: Target, messages: list[Message], tools: str | None, template_kwargs: str | None = None
) -> list[_Draft]:
    """One draft for all turns that merge (see `from_completion`; here the test is made on texts), else one per turn.

    Raises TemplateError when the template or the format of its turns refuses the conversation.
    """
    form = turn_format.of(target)
    drafts: list[_Draft] = []
    turn = 0
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = target.render_text(messages[:position], tools, template_kwargs)
        answer, flags = form.write(target, prompt, message)
        last = drafts[-1] if drafts else None
        if last is not None and prompt.startswith(last.text) and _joined(target, last, prompt):
            last.pieces.append((prompt[len(last.text) :], 0))
        else:
            last = _Draft([(prompt, 0)])
            drafts.append(last)
        last.pieces.append((answer, 1))
        last.text = prompt + answer
        last.turn, last.messages = turn, messages[: position + 1]
        last.flags |= set(flags)
        turn += 1
    if not drafts:
        raise TemplateError("the conversation has no assistant turn")
    return drafts


def _joined(target: Target, draft: _Draft, prompt: str) -> bool:
    """Whether `prompt`, tokenized as a whole, literally starts with the ids of the draft's pieces."""
    glue = prompt[len(draft.text) :]
    before, answer = draft.pieces[-2][0], draft.pieces[-1][0]
    return target.separable(before, answer) and target.separable(answer, glue)


def _ready(prompt: Prompt) -> Sample:
    """Ready tokens, passed through for validation to check."""
    assert prompt.input_ids is not None
    return Sample(
        id=prompt.id,
        prompt_id=prompt.id,
        dataset=prompt.dataset,
        input_ids=prompt.input_ids,
        loss_mask=prompt.loss_mask or [],
        ids_origin="given",
        outcome="kept",
        messages=prompt.messages,
        tools=prompt.tools,
    )


def _batches(rows: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    batch: list[Prompt] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
