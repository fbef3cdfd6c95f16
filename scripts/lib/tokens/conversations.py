"""Stage 3 of class A: ready conversations become training samples, ready tokens pass through.

A conversation is rendered turn by turn, as it would have been generated: each answer is written after the prompt that
the target's template makes of what came before, and every answer that is to be learnt has mask 1. For example (Llama):

    pieces  <|begin_of_text|>...user...Hi<|eot_id|>...assistant...\\n\\n   mask 0
            Hello.<|eot_id|>                                            mask 1
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core import records
from scripts.lib.core.records import Message, Prompt, Sample
from scripts.lib.target import tool_calls, turn_format
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.tokens.provenance import provenance_of

# Text that is tokenized at once, so that the tokenizer's threads have work. Rows differ by a factor of 10,000.
CHARACTERS_AT_ONCE = 500_000


def tokenize_conversations(config: Config, dataset: str, target: Target, prompts: Path, output: Path) -> dict[str, int]:
    """Turn a shard of ready conversations or ready tokens (class A) into a shard of samples. Returns counts."""
    counts = {"prompts": 0, "samples": 0}

    def counted() -> Iterator[Prompt]:
        for prompt in records.read_rows(prompts, Prompt):
            counts["prompts"] += 1
            yield prompt

    counts["samples"] = records.write_rows(
        output, Sample, from_conversations(target, counted()), provenance_of(config, dataset, target, prompts)
    )
    return counts


def from_conversations(target: Target, prompts: Iterable[Prompt]) -> Iterator[Sample]:
    """Samples of class-A prompts: ready tokens as they are, conversations rendered with every answer supervised.

    Answers that are not to be learnt have mask 0, and nothing follows the last one that is. A row without any is one
    sample with an empty mask, and a row that the chat template refuses one without ids and with the flag
    `template_error`: validation rejects and counts both. Memory holds the drafts of one row and
    CHARACTERS_AT_ONCE of text.
    """
    drafts = (draft for prompt in prompts for draft in _drafts(target, prompt))
    for batch in _batches(drafts):
        encoded = iter(target.encode_batch([text for draft in batch for text, _ in draft.pieces]))
        for draft in batch:
            yield _sample(draft, encoded)


@dataclass(slots=True)
class _Draft:
    """A sample before its texts are tokenized. Pieces are encoded apart: `(text, mask)`."""

    prompt: Prompt
    pieces: list[tuple[str, int]] = field(default_factory=list)
    text: str = ""  # of all pieces, while it grows
    turn: int = 0  # the last one that is learnt
    messages: list[Message] = field(default_factory=list)  # up to that turn
    flags: set[str] = field(default_factory=set)
    learnt: int = 0  # pieces up to the last one with mask 1
    several: bool = False  # whether the prompt has other samples

    def size(self) -> int:
        return sum(len(text) for text, _ in self.pieces)


def _batches(drafts: Iterable[_Draft]) -> Iterator[list[_Draft]]:
    batch: list[_Draft] = []
    size = 0
    for draft in drafts:
        if batch and size + draft.size() > CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(draft)
        size += draft.size()
    if batch:
        yield batch


def _sample(draft: _Draft, encoded: Iterator[list[int]]) -> Sample:
    prompt = draft.prompt
    if prompt.input_ids is not None:
        return _ready(prompt)
    ids: list[int] = []
    mask: list[int] = []
    for _, supervised in draft.pieces:
        piece = next(encoded)
        ids += piece
        mask += [supervised] * len(piece)
    return Sample(
        id=f"{prompt.id}/{draft.turn}" if draft.several else prompt.id,
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


def _drafts(target: Target, prompt: Prompt) -> list[_Draft]:
    """The drafts of a prompt, at least one."""
    if prompt.input_ids is not None:
        return [_Draft(prompt)]
    try:
        drafts = _learnable(_rendered(target, prompt))
    except ValueError:  # TemplateError, NotWritable
        drafts = [_Draft(prompt, messages=prompt.messages, flags={"template_error"})]
    for draft in drafts:
        draft.text, draft.several = "", len(drafts) > 1
    return drafts


def _rendered(target: Target, prompt: Prompt) -> list[_Draft]:
    """One draft for all turns that merge (see `completions`; here the test is made on texts), else one per turn.

    Raises TemplateError when the template or the format of its turns refuses the conversation.
    """
    form = turn_format.of(target)
    formed = tool_calls.form_of(target).applied(prompt.messages)
    messages = [form.shown(form.apart(message)) for message in formed]
    answers = [position for position, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise TemplateError("the conversation has no assistant turn")
    drafts: list[_Draft] = []
    for turn, position in enumerate(answers):
        asked = target.render_text(messages[:position], prompt.tools, prompt.template_kwargs)
        answer, flags = form.write(target, asked, messages[position])
        last = drafts[-1] if drafts else None
        if last is not None and asked.startswith(last.text) and _joined(target, last, asked):
            last.pieces.append((asked[len(last.text) :], 0))
        else:
            last = _Draft(prompt, [(asked, 0)])
            drafts.append(last)
        last.text = asked + answer
        _append(last, answer, turn, messages[: position + 1], set(flags))
    return drafts


def _append(draft: _Draft, answer: str, turn: int, messages: list[Message], flags: set[str]) -> None:
    trainable = messages[-1].trainable
    draft.pieces.append((answer, int(trainable)))
    if trainable or not draft.learnt:
        draft.turn, draft.messages = turn, messages
    if trainable:
        draft.learnt = len(draft.pieces)
        draft.flags |= flags


def _learnable(drafts: list[_Draft]) -> list[_Draft]:
    """The drafts that teach something, each up to the last answer that is learnt; the last one when none does."""
    teaching = [draft for draft in drafts if draft.learnt]
    for draft in teaching:
        del draft.pieces[draft.learnt :]
    return teaching or drafts[-1:]


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
