"""Raw rows to conversations: the formats in which prompt and conversation datasets are published.

`auto` looks at each row's columns, so that a file may mix formats. Column names can be overridden (`fields` in the
config, dotted for nested ones: `meta.question`); where `fields` names the prompt, only named columns join it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.config.model import Fields
from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources import transcripts, weights
from scripts.lib.prompts.sources.choices import choices_text
from scripts.lib.prompts.sources.contents import first_of, text_of
from scripts.lib.prompts.sources.fields import Columns
from scripts.lib.prompts.sources.tool_calls import json_text, read_calls_in_texts, to_tools, without_tool_prompt
from scripts.lib.prompts.sources.trees import best_path
from scripts.lib.prompts.sources.turns import ROLE_KEYS, ROLES, Reading, pair_in, to_messages

_PROMPT_OF = {
    "instruction": ("instruction", "query", "prompt"),
    "question_answer": ("question", "problem", "query"),
    "prompt_response": ("prompt", "input", "message_1"),
    "text": ("text", "prompt"),
}
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_SYSTEM_MARK = re.compile(r"\A\s*SYSTEM:\s*")  # glaive's column keeps the marker of its transcripts
_HUMAN_ASSISTANT = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
# What a row of one message has beside it; conversations are made of several such rows (Open Assistant, Reddit).
_PARENT = ("parent_id", "parent_message_id")
# Template variables that are something else in a row, or nobody's to set.
_NOT_VARIABLES = ("messages", "tools", "add_generation_prompt", "documents", "custom_instructions")
_TOOL_VARIABLES = ("xml_tools", "python_tools")
INT32 = 1 << 31


@dataclass(slots=True)
class Conversation:
    """A row in the project's terms, not cleaned yet."""

    messages: list[Message] = field(default_factory=list)
    tools: str | None = None
    template_kwargs: str | None = None  # JSON text of an object: template variables of this row alone
    row_id: str | None = None  # the source's own id of the row
    prompts_only: bool = False  # user turns follow each other: the source has no answers
    changes: list[str] = field(default_factory=list)  # names of CHANGES that reading it made
    unused: dict[str, int] = field(default_factory=dict)  # columns with text that nobody read -> characters
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


def to_conversation(value: Any, form: str, fields: Fields, answers: bool = True) -> Conversation:
    """The conversation of one row. `answers`: whether those of the source matter (class A). Raises Defect."""
    if isinstance(value, str):
        value = {"text": value}
    elif isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise Defect("not_an_object")
    columns = Columns(value, fields)
    for name in _MEDIA_COLUMNS:
        if isinstance(columns.look(name), list | dict | bytes) and columns.look(name):
            raise Defect("media", f"column `{name}`")
    reading = Reading(fields.role, fields.content, answers)
    conversation = _READERS[detect(columns) if form == "auto" else form](columns, reading)
    row_id = columns.get("id")
    if isinstance(row_id, str | int) and not isinstance(row_id, bool):
        conversation.row_id = str(row_id)
    if conversation.input_ids is None:
        if answers:
            weights.refuse_unlearnt(columns)
        conversation.tools = to_tools(columns.get("tools"))
        _put_system_first(conversation.messages, _SYSTEM_MARK.sub("", columns.text("system")))
        _read_variables(conversation, columns)
        _cut_tool_prompt(conversation, reading)
        conversation.messages = read_calls_in_texts(conversation.messages, conversation.tools, answers)
    conversation.changes = sorted(reading.changes)
    conversation.unused = columns.unused({message.content for message in conversation.messages})
    return conversation


def question_alone(value: Any) -> str | None:
    """The bare question of a row whose prompt also holds what it is about, or choices; None for all others.

    Evaluation sets are met without those, too.
    """
    columns = Columns(value, Fields()) if isinstance(value, dict) else None
    if columns is None or not columns.has("context", "contexts", "passage", "article", "choices", "options"):
        return None
    question = columns.peek("prompt")
    return question if isinstance(question, str) else None


def detect(columns: Columns) -> str:
    """The format of a row by its columns. Raises Defect `unknown_format`."""
    if columns.peek("input_ids") is not None and (
        columns.peek("loss_mask") is not None or columns.peek("labels") is not None or not columns.has("messages")
    ):
        return "tokens"
    if columns.named("messages"):
        return "messages"
    if columns.named("prompt"):
        return "prompt_response"
    if _is_preference(columns):
        return "preference"
    turns = columns.peek("messages")
    if isinstance(turns, list | dict) or _is_json_list(turns):
        return "messages"
    if any(
        isinstance(columns.look(name), list) or _is_messages_text(columns.look(name)) for name in ("prompt", "input")
    ):
        return "prompt_response"
    if columns.has("replies", "children") or (isinstance(columns.look("prompt"), dict)):
        return "tree"
    for form in ("instruction", "question_answer", "prompt_response", "text"):
        # Beside a question, `query` is what answers it: SQL, or what to search for.
        names = [name for name in _PROMPT_OF[form] if name != "query" or not columns.has("question")]
        if any(isinstance(columns.look(name), str) for name in names):
            return form
    if _is_texts(columns.look("question")):
        return "question_answer"
    if isinstance(turns, str) and transcripts.turns_in(turns) is not None:
        return "messages"
    if isinstance(columns.look("history"), list) or pair_in(columns.row, Reading(answers=False)) is not None:
        return "pairs"
    _refuse_one_message(columns)
    raise Defect("unknown_format", f"columns {', '.join(map(str, columns.row))[:120] or 'none'}")


def _is_preference(columns: Columns) -> bool:
    chosen = columns.look("chosen")
    judged = columns.has("completion") and isinstance(columns.look("label"), bool)
    return judged or (chosen is not None and not isinstance(chosen, bool))


def _is_json_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[") and transcripts.turns_in(value) is None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _refuse_one_message(columns: Columns) -> None:
    """Refuse a row that is one message of a conversation: as a prompt it lacks what was said before."""
    role = first_of({name: columns.look(name) for name in ROLE_KEYS}, ROLE_KEYS)
    if isinstance(role, str) and role.strip().lower() in ROLES:
        raise Defect("single_message", f"it has a role of its own, {role!r}")
    for name in _PARENT:
        if name in {str(column).lower() for column in columns.row}:
            raise Defect("single_message", f"it has a `{name}`")


def _messages(columns: Columns, reading: Reading) -> Conversation:
    turns = columns.get("messages")
    if turns is None:
        raise Defect("missing_field", "no column of messages")
    if isinstance(turns, str) and (said := transcripts.turns_in(turns)) is not None:
        reading.changes.add("transcript_split")
        return Conversation(said)
    only_texts = _is_texts(turns)
    if only_texts and not columns.named("messages") and not columns.has("turns"):
        raise Defect("bad_messages", "texts that don't say who speaks: name `fields.messages` if all are the user's")
    messages = to_messages(turns, reading)
    if reading.answers:
        weights.follow_list(columns, messages)
    if columns.named("response"):
        messages += _answer(columns, reading)
    return Conversation(messages, prompts_only=only_texts)


def _pairs(columns: Columns, reading: Reading) -> Conversation:
    turns = columns.get("messages") or columns.plain("history")
    if turns is None and (pair := pair_in(columns.row, reading)) is not None:
        for name in columns.row:
            columns.plain(str(name).lower())
        return Conversation(pair)
    messages = to_messages(turns, reading)
    prompt = columns.text("prompt")
    if prompt:
        messages.append(Message("user", prompt))
        messages += _answer(columns, reading)
    return Conversation(messages)


def _instruction(columns: Columns, reading: Reading) -> Conversation:
    prompt = columns.text("prompt", _PROMPT_OF["instruction"])
    given = columns.text("input", ("input",))
    instances = columns.plain("instances")
    answer = _answer(columns, reading)
    if isinstance(instances, list) and instances and isinstance(instances[0], dict):  # self-instruct
        first = instances[0]
        given = text_of(first.get("input"))[0]
        answer = _said(first.get("output"), reading)
    if not prompt.strip() and not given.strip():
        raise Defect("missing_field", "neither instruction nor input")
    # Without its input an instruction can't be answered.
    messages = _asked(columns, reading, "\n\n".join(part for part in (prompt, given) if part.strip()))
    history = columns.plain("history")
    before = to_messages(history, reading) if isinstance(history, list) and history else []
    return Conversation([*before, *messages, *answer])


def _question_answer(columns: Columns, reading: Reading) -> Conversation:
    questions = columns.get("prompt", _PROMPT_OF["question_answer"])
    if _is_texts(questions):
        return _texts(questions, columns, reading)
    question = _required(columns, "prompt", _PROMPT_OF["question_answer"])
    return Conversation([*_asked(columns, reading, question), *_answer(columns, reading)])


def _prompt_response(columns: Columns, reading: Reading) -> Conversation:
    prompt = columns.get("prompt", _PROMPT_OF["prompt_response"])
    if _is_texts(prompt):
        return _texts(prompt, columns, reading)
    if isinstance(prompt, list | dict) or _is_messages_text(prompt):
        return Conversation([*to_messages(prompt, reading), *_answer(columns, reading)])
    text = _required(columns, "prompt", _PROMPT_OF["prompt_response"])
    if columns.named("input") and (given := columns.text("input")).strip():
        text = f"{text}\n\n{given}"
    return Conversation([*_asked(columns, reading, text), *_answer(columns, reading)])


def _texts(questions: list[str], columns: Columns, reading: Reading) -> Conversation:
    """A list of the user's texts; with answers where there is one for each."""
    answers = columns.peek("response")
    if isinstance(answers, list) and len(answers) == len(questions):
        columns.get("response")
        return Conversation(to_messages([list(pair) for pair in zip(questions, answers)], reading))
    return Conversation([Message("user", text) for text in questions], prompts_only=True)


def _is_messages_text(value: Any) -> bool:
    return isinstance(value, str) and bool(re.match(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""", value))


def _text(columns: Columns, reading: Reading) -> Conversation:
    texts = columns.get("prompt", _PROMPT_OF["text"])
    if _is_texts(texts):
        return _texts(texts, columns, reading)
    return Conversation(_asked(columns, reading, _required(columns, "prompt", _PROMPT_OF["text"]), document=True))


def _asked(columns: Columns, reading: Reading, text: str, document: bool = False) -> list[Message]:
    """The user's turn of a single-turn row: its text, what it is about, and what there is to choose from.

    A transcript in one text is split into its turns. Where the config names the prompt, it is taken as it is.
    `document`: a column `text`, which may hold question and answer.
    """
    if columns.named("prompt"):
        return [Message("user", text)]
    _refuse_one_message(columns)
    turns = transcripts.turns_in(text, document)
    if turns is not None:
        reading.changes.add("transcript_split")
        return turns
    parts = [text]
    context = columns.peek("context")
    if (isinstance(context, str) or _is_texts(context)) and not columns.named("input"):
        columns.get("context")
        parts += [context] if isinstance(context, str) else context
    choices = choices_text(columns.peek("choices"))
    if choices is not None:
        columns.get("choices")
        parts.append(choices)
    return [Message("user", "\n\n".join(part for part in parts if part.strip()))]


def _preference(columns: Columns, reading: Reading) -> Conversation:
    """DPO and KTO: the prompt, answered by what people preferred (class A) or by nobody."""
    columns.plain("rejected")
    base = columns.get("messages")
    if base is None:
        base = columns.get("prompt", ("prompt", "instruction", "question", "query", "input"))
    messages = (
        [] if base is None else _asked(columns, reading, base) if isinstance(base, str) else to_messages(base, reading)
    )
    chosen = columns.plain("chosen")
    if isinstance(chosen, bool):
        chosen = None
    if isinstance(chosen, str) and not messages:
        return Conversation(_transcript(chosen))
    if isinstance(chosen, list) and chosen:
        answer = to_messages(chosen, reading)
        if answer[0].role != "assistant":
            return Conversation(answer)  # the prompt is told again
    elif isinstance(chosen, dict) and first_of(chosen, ("role", "from")) is not None:
        answer = to_messages([chosen], reading)
    elif chosen is not None:
        answer = _said(chosen, reading)
    else:
        answer = _answer(columns, reading)
    if not messages:
        raise Defect("missing_field", "no prompt beside the preferred answer")
    if messages[-1].role == "assistant":
        return Conversation(messages)
    return Conversation(messages + answer)


def _transcript(text: str) -> list[Message]:
    """`\\n\\nHuman: ...\\n\\nAssistant: ...`, as Anthropic's preference data is written."""
    pieces = _HUMAN_ASSISTANT.split(text)
    if len(pieces) < 3 or pieces[0].strip():
        raise Defect("missing_field", "the preferred answer has no prompt")
    return [
        Message("user" if speaker == "Human" else "assistant", said)
        for speaker, said in zip(pieces[1::2], pieces[2::2])
    ]


def _tree(columns: Columns, reading: Reading) -> Conversation:
    root = columns.get("messages", ("prompt",)) if isinstance(columns.look("prompt"), dict) else columns.row
    if root is columns.row:
        for name in columns.row:
            columns.plain(str(name).lower())
    return Conversation(to_messages(best_path(root), reading))


def _tokens(columns: Columns, reading: Reading) -> Conversation:
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
        raise Defect("missing_field", f"no text in {columns.fields.prompt or ' | '.join(names)}")
    return text


def _answer(columns: Columns, reading: Reading) -> list[Message]:
    """The answer that a row carries beside its prompt; [] when there is none."""
    value = columns.get("response")
    if isinstance(value, dict) and first_of(value, ("content", "value", "text")) is not None:
        value = first_of(value, ("content", "value", "text"))
    column = columns.get("reasoning")
    if _is_turns(value):
        return to_messages(value, reading)
    return _said(value, reading, column if isinstance(column, str) and column.strip() else None)


def _said(value: Any, reading: Reading, thought: str | None = None) -> list[Message]:
    """A value that is an answer as a turn; [] where it says nothing."""
    try:
        text, reasoning = text_of(value)
    except Defect:
        if reading.answers:
            raise
        text, reasoning = str(value), ""  # class B cuts it off, whatever it is
    reasoning = thought or reasoning
    return [Message("assistant", text, reasoning=reasoning or None)] if text.strip() or reasoning else []


def _is_turns(value: Any) -> bool:
    """Whether an answer is a list of turns with roles, as TRL's conversational completions are."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and first_of(turn, ROLE_KEYS) is not None for turn in value)
    )


def _put_system_first(messages: list[Message], system: str) -> None:
    if not system.strip():
        return
    if messages and messages[0].role == "system":
        if messages[0].content.strip() not in ("", system.strip()):
            raise Defect("system_not_first", "the system column and the first turn differ")
        messages[0].content = system
    else:
        messages.insert(0, Message("system", system))


def _cut_tool_prompt(conversation: Conversation, reading: Reading) -> None:
    first = conversation.messages[0] if conversation.messages else None
    if conversation.tools is None or first is None or first.role != "system":
        return
    rest = without_tool_prompt(first.content)
    if rest != first.content:
        reading.changes.add("tool_prompt_cut")
        first.content = rest
        conversation.messages = conversation.messages[0 if rest else 1 :]


def _read_variables(conversation: Conversation, columns: Columns) -> None:
    """A row's own template variables. SmolTalk 2 has system prompt and tools among them, which other templates lack."""
    value = columns.look("chat_template_kwargs")
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except NotJson:
            return
    if not isinstance(value, dict):
        return
    columns.plain("chat_template_kwargs")
    system = value.get("custom_instructions")
    if isinstance(system, str):
        _put_system_first(conversation.messages, system)
    for name in _TOOL_VARIABLES:
        if conversation.tools is None:
            conversation.tools = to_tools(value.get(name))
    known = (*_NOT_VARIABLES, *_TOOL_VARIABLES)
    own = {name: variable for name, variable in value.items() if variable is not None and name not in known}
    if own:
        conversation.template_kwargs = json_text(own)


_READERS: dict[str, Callable[[Columns, Reading], Conversation]] = {
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
FORMATS = frozenset(_READERS)
