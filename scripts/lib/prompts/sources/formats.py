"""Raw rows to conversations: the formats in which prompt and conversation datasets are published.

`auto` looks at each row's columns, so that a file may mix formats. Column names can be overridden (`fields` in the
config, dotted for nested ones: `meta.question`). What the columns are called in public datasets: the dataset cards
named in `presets`, and the dataset docs of LLaMA-Factory, axolotl, ms-swift and SpecForge.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.config.model import Fields
from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.trees import best_path
from scripts.lib.prompts.sources.turns import first_of, text_of, to_messages, to_tools

COLUMNS = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat"),
    "prompt": ("prompt", "instruction", "question", "problem", "query", "input", "message_1", "text"),
    "input": ("input", "options"),
    "response": (
        "response", "output", "answer", "solution", "completion", "canonical_solution", "rationale", "message_2",
        "generated_message",
    ),
    "reasoning": ("reasoning_content", "thinking", "thought"),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "id": (
        "id", "uuid", "prompt_id", "conversation_id", "conversation_hash", "question_id", "task_id", "problem_id",
        "message_tree_id", "_id",
    ),
    "input_ids": ("input_ids",),
    "labels": ("labels",),
    "loss_mask": ("loss_mask",),
}  # fmt: skip
_PROMPT_OF = {
    "instruction": ("instruction", "query", "prompt"),
    "question_answer": ("question", "problem", "query"),
    "prompt_response": ("prompt", "input", "message_1"),
    "text": ("text", "prompt"),
}
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
INT32 = 1 << 31


@dataclass(slots=True)
class Conversation:
    """A row in the project's terms, not cleaned yet."""

    messages: list[Message] = field(default_factory=list)
    tools: str | None = None
    template_kwargs: str | None = None  # JSON text of an object: template variables of this row alone
    row_id: str | None = None  # the source's own id of the row
    prompts_only: bool = False  # user turns follow each other: the source has no answers
    turn_weights: bool = False  # the source weighs turns, which is not followed
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


class Columns:
    """A row's columns by what they mean: the configured name, or the usual ones. Upper case is tolerated."""

    def __init__(self, row: dict, fields: Fields):
        self.row = row
        self._fields = fields
        self._lower = {name.lower(): value for name, value in row.items() if isinstance(name, str)}

    def get(self, meaning: str, names: tuple[str, ...] | None = None) -> Any:
        """The value of the column for `meaning`; None when it is absent or null."""
        override = getattr(self._fields, meaning)
        if override is not None:
            return self._nested(override)
        return first_of(self._lower, names or COLUMNS[meaning])

    def text(self, meaning: str, names: tuple[str, ...] | None = None) -> str:
        """The text of a column; "" when there is none. Raises Defect when it holds something else."""
        return text_of(self.get(meaning, names))[0]

    def named(self, meaning: str) -> bool:
        """Whether the config names the column for `meaning`."""
        return getattr(self._fields, meaning) is not None

    def has(self, *names: str) -> bool:
        return any(self._lower.get(name) is not None for name in names)

    def plain(self, name: str) -> Any:
        return self._lower.get(name)

    def _nested(self, path: str) -> Any:
        if path in self.row:
            return self.row[path]
        value: Any = self.row
        for step in path.split("."):
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return None
        return value


def to_conversation(value: Any, format: str, fields: Fields) -> Conversation:
    """The conversation of one row. Raises Defect."""
    if isinstance(value, str):
        value = {"text": value}
    elif isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise Defect("not_an_object")
    columns = Columns(value, fields)
    for name in _MEDIA_COLUMNS:
        if isinstance(columns.plain(name), list | dict | bytes) and columns.plain(name):
            raise Defect("media", f"column `{name}`")
    conversation = _READERS[detect(columns) if format == "auto" else format](columns)
    row_id = columns.get("id")
    if isinstance(row_id, str | int) and not isinstance(row_id, bool):
        conversation.row_id = str(row_id)
    if conversation.input_ids is None:
        conversation.tools = to_tools(columns.get("tools"))
        _put_system_first(conversation.messages, columns)
    return conversation


def detect(columns: Columns) -> str:
    """The format of a row by its columns. Raises Defect `unknown_format`."""
    if columns.get("input_ids") is not None and (
        columns.get("loss_mask") is not None or columns.get("labels") is not None or not columns.has("messages")
    ):
        return "tokens"
    if columns.named("messages"):
        return "messages"
    if columns.named("prompt"):
        return "prompt_response"
    if columns.has("chosen") or (columns.has("completion") and isinstance(columns.plain("label"), bool)):
        return "preference"
    if isinstance(columns.get("messages"), list | dict) or _is_json_list(columns.get("messages")):
        return "messages"
    if isinstance(columns.plain("prompt"), list) or isinstance(columns.plain("input"), list):
        return "prompt_response"
    if columns.has("replies", "children") or (isinstance(columns.plain("prompt"), dict)):
        return "tree"
    for format in ("instruction", "question_answer", "prompt_response", "text"):
        if any(isinstance(columns.plain(name), str) for name in _PROMPT_OF[format]):
            return format
    if isinstance(columns.plain("history"), list):
        return "pairs"
    raise Defect("unknown_format", f"columns {', '.join(map(str, columns.row))[:120] or 'none'}")


def _is_json_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[")


def _messages(columns: Columns) -> Conversation:
    turns = columns.get("messages")
    if turns is None:
        raise Defect("missing_field", "no column of messages")
    fields = columns._fields
    messages = to_messages(turns, fields.role, fields.content)
    if columns.named("response"):
        messages += _answer(columns)
    only_texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
    weighed = isinstance(turns, list) and any(
        isinstance(turn, dict) and (turn.get("loss_weight") is not None or turn.get("train") is not None)
        for turn in turns
    )
    return Conversation(messages, prompts_only=only_texts, turn_weights=weighed)


def _pairs(columns: Columns) -> Conversation:
    turns = columns.get("messages") or columns.plain("history")
    messages = to_messages(turns)
    prompt = columns.text("prompt")
    if prompt:
        messages.append(Message("user", prompt))
        messages += _answer(columns)
    return Conversation(messages)


def _instruction(columns: Columns) -> Conversation:
    prompt = columns.text("prompt", _PROMPT_OF["instruction"])
    given = columns.text("input")
    instances = columns.plain("instances")
    answer = _answer(columns)
    if isinstance(instances, list) and instances and isinstance(instances[0], dict):  # self-instruct
        first = instances[0]
        given = text_of(first.get("input"))[0]
        answer = [Message("assistant", text_of(first.get("output"))[0])]
    if not prompt.strip() and not given.strip():
        raise Defect("missing_field", "neither instruction nor input")
    # Without its input an instruction can't be answered.
    user = "\n\n".join(part for part in (prompt, given) if part.strip())
    history = columns.plain("history")
    before = to_messages(history) if isinstance(history, list) and history else []
    return Conversation([*before, Message("user", user), *answer])


def _question_answer(columns: Columns) -> Conversation:
    question = _required(columns, "prompt", _PROMPT_OF["question_answer"])
    options = columns.plain("options")
    if isinstance(options, str) and options.strip():
        question = f"{question}\n\n{options}"
    return Conversation([Message("user", question), *_answer(columns)])


def _prompt_response(columns: Columns) -> Conversation:
    prompt = columns.get("prompt", _PROMPT_OF["prompt_response"])
    if isinstance(prompt, list | dict) or _is_messages_text(prompt):
        messages = to_messages(prompt, columns._fields.role, columns._fields.content)
    else:
        text = _required(columns, "prompt", _PROMPT_OF["prompt_response"])
        if columns.named("input") and (given := columns.text("input")).strip():
            text = f"{text}\n\n{given}"
        messages = [Message("user", text)]
    return Conversation(messages + _answer(columns))


def _is_messages_text(value: Any) -> bool:
    return isinstance(value, str) and bool(re.match(r'\s*\[\s*\{\s*"(role|from|content|value)"\s*:', value))


def _text(columns: Columns) -> Conversation:
    return Conversation([Message("user", _required(columns, "prompt", _PROMPT_OF["text"]))])


def _preference(columns: Columns) -> Conversation:
    """DPO and KTO: the prompt, answered by what people preferred (class A) or by nobody."""
    base = columns.get("messages")
    if base is None:
        base = columns.get("prompt", ("prompt", "instruction", "question", "query", "input"))
    messages = [] if base is None else [Message("user", base)] if isinstance(base, str) else to_messages(base)
    chosen = columns.plain("chosen")
    if isinstance(chosen, str) and not messages:
        return Conversation(_transcript(chosen))
    if isinstance(chosen, list) and chosen:
        answer = to_messages(chosen)
        if answer[0].role != "assistant":
            return Conversation(answer)  # the prompt is told again
    elif isinstance(chosen, dict) and first_of(chosen, ("role", "from")) is not None:
        answer = to_messages([chosen])
    elif chosen is not None:
        answer = [Message("assistant", text_of(chosen)[0])]
    else:
        # KTO: an answer that people disliked is no answer to learn.
        answer = _answer(columns) if columns.plain("label") is True else []
    if not messages:
        raise Defect("missing_field", "no prompt beside the preferred answer")
    if messages[-1].role == "assistant":
        return Conversation(messages)
    return Conversation(messages + answer)


def _transcript(text: str) -> list[Message]:
    """`\\n\\nHuman: ...\\n\\nAssistant: ...`, as Anthropic's preference data is written."""
    pieces = _TRANSCRIPT.split(text)
    if len(pieces) < 3 or pieces[0].strip():
        raise Defect("missing_field", "the preferred answer has no prompt")
    return [
        Message("user" if speaker == "Human" else "assistant", said)
        for speaker, said in zip(pieces[1::2], pieces[2::2])
    ]


def _tree(columns: Columns) -> Conversation:
    root = columns.get("messages", ("prompt",)) if isinstance(columns.plain("prompt"), dict) else columns.row
    return Conversation(to_messages(best_path(root)))


def _tokens(columns: Columns) -> Conversation:
    ids = _int_list(columns.get("input_ids"), "input_ids")
    labels = columns.get("labels")
    if columns.get("loss_mask") is not None:
        mask = _int_list(columns.get("loss_mask"), "loss_mask")
    elif labels is not None:
        labels = _int_list(labels, "labels")
        mask = [int(label != -100) for label in labels]
    else:
        raise Defect("missing_field", "input_ids without labels or loss_mask: nothing says what the target wrote")
    if len(ids) != len(mask) or not ids:
        raise Defect("bad_tokens", f"{len(ids)} ids, {len(mask)} of the mask")
    if any(value not in (0, 1) for value in mask):
        raise Defect("bad_tokens", "the mask holds more than 0 and 1")
    if labels is not None and any(masked and label != token for masked, label, token in zip(mask, labels, ids)):
        raise Defect("shifted_labels", "a label differs from the id at its place")
    attention = columns.plain("attention_mask")
    if attention is not None:
        attention = _int_list(attention, "attention_mask")
        if len(attention) != len(ids):
            raise Defect("bad_tokens", f"{len(ids)} ids, {len(attention)} of attention_mask")
        ids = [token for token, attended in zip(ids, attention) if attended]  # padding goes
        mask = [value for value, attended in zip(mask, attention) if attended]
    return Conversation(input_ids=ids, loss_mask=mask)


def _int_list(value: Any, name: str) -> list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # a batch of one
    if not isinstance(value, list) or not all(isinstance(item, int) and -INT32 <= item < INT32 for item in value):
        raise Defect("bad_tokens", f"{name} is not a list of integers")
    return [int(item) for item in value]


def _required(columns: Columns, meaning: str, names: tuple[str, ...]) -> str:
    text = columns.text(meaning, names)
    if not text.strip():
        raise Defect("missing_field", f"no text in {columns._fields.prompt or ' | '.join(names)}")
    return text


def _answer(columns: Columns) -> list[Message]:
    """The answer that a row carries beside its prompt; [] when there is none."""
    value = columns.get("response")
    if isinstance(value, dict) and first_of(value, ("content", "value", "text")) is not None:
        value = first_of(value, ("content", "value", "text"))
    if value is None:
        return []
    text, reasoning = text_of(value)
    column = columns.get("reasoning")
    reasoning = column if isinstance(column, str) and column.strip() else reasoning
    return [Message("assistant", text, reasoning=reasoning or None)] if text.strip() or reasoning else []


def _put_system_first(messages: list[Message], columns: Columns) -> None:
    system = columns.text("system")
    if not system.strip():
        return
    if messages and messages[0].role == "system":
        if messages[0].content.strip() not in ("", system.strip()):
            raise Defect("system_not_first", "the system column and the first turn differ")
        messages[0].content = system
    else:
        messages.insert(0, Message("system", system))


_READERS: dict[str, Callable[[Columns], Conversation]] = {
    "messages": _messages,
    "sharegpt": _messages,
    "turns": _messages,
    "instruction": _instruction,
    "question_answer": _question_answer,
    "prompt_response": _prompt_response,
    "pairs": _pairs,
    "preference": _preference,
    "tree": _tree,
    "tokens": _tokens,
    "text": _text,
}
