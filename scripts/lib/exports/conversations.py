"""Conversations as JSON Lines, in the dialects of the trainers that render and tokenize themselves.

Such a trainer makes the ids anew, so they are the sampled ones only where text and template give them
back: each export checks that on its first rows and says how many differ. Where it matters, use the
`tokens` export.

Trainers load these files with `datasets`, which fixes the columns by the first block of the first
file: a key that shows up later, or that was null so far, stops the load (tried: datasets 4.0 and 5.1).
So all rows have the same keys, only those that the corpus uses, and samples that hold a value for
each of them come first. Tool calls and tool definitions are JSON text where the trainer reads that,
because their arguments have a type of their own in each row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.compute as pc

from scripts.lib.core.exact_json import json_text, parse_json
from scripts.lib.core.records import Message, Sample
from scripts.lib.exports.json_lines import JsonLines
from scripts.lib.exports.report import Report, unrenderable
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.target.tool_calls import CallForm
from scripts.lib.training.reader import Corpus

CHECKED = 200  # samples whose text is rendered and tokenized again to see whether the ids come back


@dataclass(frozen=True)
class Dialect:
    """How one trainer wants its conversations."""

    column: str = "conversations"
    id_column: str | None = "id"
    reasoning: str | None = "reasoning_content"  # key of the thought; None: the trainer has none
    tools: bool = True  # whether tool calls, tool results and tool definitions can be told
    tool_calls_as_text: bool = True
    last_answer_only: str | None = None  # setting that makes the trainer supervise only the last answer

    def export(self, corpus: Corpus, target: Target, folder: Path, report: Report) -> None:
        """Write a row per sample; per answer where the trainer can be told to learn the last one only."""
        used = _used(corpus, self)
        checked = different = 0
        with JsonLines(folder, report) as lines:
            for sample in self._leading_first(corpus, used):
                report.read += 1
                reason = self._unfit(sample)
                if reason:
                    report.left_out[reason] += 1
                    continue
                if checked < CHECKED:
                    checked += 1
                    different += not comes_back(target, sample)
                self._count_losses(sample, report)
                for messages in self._rows(sample, report):
                    lines.write(self._row(sample, messages, used))
        if self.last_answer_only:
            report.settings[self.last_answer_only] = True
        report.lost["exact ids and loss mask: the trainer tokenizes the text again"] = report.read - sum(
            report.left_out.values()
        )
        report.notes.append(
            f"{different} of {checked} conversations checked give other ids when rendered with the target's template"
        )

    def _unfit(self, sample: Sample) -> str | None:
        reason = unrenderable(sample)
        if reason:
            return reason
        turns = [message for message in sample.messages if message.role != "system"]
        if not turns or turns[0].role != "user":
            return "the first turn is not the user's"
        if turns[-1].role != "assistant":
            return "the last turn is not the assistant's"
        if not self.tools and any(message.role == "tool" or message.tool_calls for message in turns):
            return "tool calls"
        return None

    def _leading_first(self, corpus: Corpus, used: set[str]) -> Iterator[Sample]:
        missing = set(used)
        first = set()
        for number, sample in enumerate(corpus.samples()):
            if not missing:
                break
            if missing & _keys(sample) and not self._unfit(sample):
                missing -= _keys(sample)
                first.add(number)
                yield sample
        for number, sample in enumerate(corpus.samples()):
            if number not in first:
                yield sample

    def _rows(self, sample: Sample, report: Report) -> Iterator[list[Message]]:
        answers = [at for at, m in enumerate(sample.messages) if m.role == "assistant" and m.trainable]
        # The answers that this sample supervises are its last ones: earlier ones are in samples of their own.
        supervised = min(_spans(sample.loss_mask), len(answers))
        if self.last_answer_only:
            for at in answers[-supervised:]:
                yield sample.messages[: at + 1]
        else:
            if supervised < sum(message.role == "assistant" for message in sample.messages):
                report.lost["mask of earlier answers: the trainer learns them again in this row"] += 1
            yield sample.messages

    def _count_losses(self, sample: Sample, report: Report) -> None:
        if self.reasoning is None and any(message.reasoning for message in sample.messages):
            report.lost["reasoning"] += 1

    def _row(self, sample: Sample, messages: list[Message], used: set[str]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self.id_column:
            answer = sum(message.role == "assistant" for message in messages) - 1
            row[self.id_column] = f"{sample.prompt_id}/{answer}" if self.last_answer_only else sample.id
        turns = []
        messages = CallForm().applied(messages)  # ids for what has none: older corpora
        for message in messages:
            turn: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                if "reasoning" in used:
                    assert self.reasoning is not None
                    turn[self.reasoning] = message.reasoning
                if "tool_calls" in used:
                    turn["tool_calls"] = self._calls(openai_calls(message.tool_calls))
            elif message.role == "tool":
                turn["tool_call_id"] = message.tool_call_id or "call_0"
                if "names" in used:
                    turn["name"] = message.name
            turns.append(turn)
        row[self.column] = turns
        if "tools" in used:
            row["tools"] = sample.tools if sample.tools is not None else "[]"
        return row

    def _calls(self, listed: list[dict]) -> Any:
        if not self.tool_calls_as_text:
            return listed
        return orjson.dumps(listed).decode() if listed else None


DIALECTS = {
    # specforge/data/preprocessing.py: other columns would become arguments of its chat template.
    "specforge": Dialect(last_answer_only="data.train_only_last_turn"),
    # Model-Optimizer's transformers_dataset.py, NeMo AutoModel's chat_dataset.py: `conversations` is deprecated
    # in the one and loses the reasoning in the other.
    "messages": Dialect(
        column="messages",
        id_column="conversation_id",
        tool_calls_as_text=False,
        last_answer_only="mask_history (AutoModel)",
    ),
    "deepspec": Dialect(reasoning="thinking"),
    "torchspec": Dialect(reasoning="thinking", tools=False),
    # Its features are exactly id and conversations of role and content.
    "angelslim": Dialect(reasoning=None, tools=False),
}


_OPTIONAL = {"reasoning": "reasoning", "tool_calls": "tool_calls", "names": "name"}  # key -> field of a message


def _used(corpus: Corpus, dialect: Dialect) -> set[str]:
    """Which optional keys some sample of the corpus has and the dialect can hold."""
    used: set[str] = set()
    for table in corpus.tables(["messages", "tools"]):
        messages = pc.list_flatten(table["messages"])
        held = {field.name for field in messages.type}  # fewer in a corpus of an earlier version
        for name, key in _OPTIONAL.items():
            if key in held and pc.struct_field(messages, key).null_count < len(messages):
                used.add(name)
        if pc.any(pc.equal(pc.struct_field(messages, "role"), "tool")).as_py():
            used.add("tool_results")
        if table["tools"].null_count < len(table):
            used.add("tools")
    return (
        used
        - (set() if dialect.tools else {"tools", "tool_calls", "names"})
        - (set() if dialect.reasoning else {"reasoning"})
    )


def _keys(sample: Sample) -> set[str]:
    """The optional keys that a sample has a value for."""
    found = {name for name, key in _OPTIONAL.items() for message in sample.messages if getattr(message, key)}
    if any(message.role == "tool" for message in sample.messages):
        found.add("tool_results")
    if sample.tools:
        found.add("tools")
    return found


def _spans(mask: list[int]) -> int:
    """Stretches of supervised tokens: one for each answer."""
    edges = np.diff(np.asarray(mask, np.int8), prepend=0)
    return int((edges == 1).sum())


def openai_calls(text: str | None) -> list[dict[str, Any]]:
    """Tool calls with every key that a trainer may want: id, type, and arguments as JSON text."""
    calls = []
    for number, call in enumerate(parse_json(text) if text else []):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        calls.append(
            {
                "id": call.get("id") or f"call_{number}",
                "type": "function",
                "function": {
                    "name": function.get("name", ""),
                    "arguments": arguments if isinstance(arguments, str) else json_text(arguments),
                },
            }
        )
    return calls


def comes_back(target: Target, sample: Sample) -> bool:
    """Whether the target's template and tokenizer give the sample's ids back from its messages."""
    try:
        text = target.render_text(sample.messages, sample.tools, sample.template_kwargs, generation_prompt=False)
        ids = target.encode(text)
    except TemplateError:
        return False
    # Templates may end with glue that no engine samples, such as a line break after the stop token.
    return ids[: len(sample.input_ids)] == sample.input_ids
