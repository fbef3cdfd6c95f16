"""The turns of a conversation as people store them, brought to the four roles that chat templates know.

An unknown role or content is a defect: templates would drop such a turn, or render it as something else, in silence.
"""

from dataclasses import dataclass, field
from typing import Any

from scripts.lib.core.exact_json import NotJson
from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources import tool_calls, weights
from scripts.lib.prompts.sources.contents import REASONING_KEYS, Content, content_of, first_of, kind_name, text_of
from scripts.lib.prompts.sources.literals import read_literal
from scripts.lib.target import thoughts

ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "bot": "assistant", "ai": "assistant", "chatbot": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool",
    "function_response": "tool", "tool_result": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text", "parts", "message")
# Two sides of a pair, the usual words first.
_ASKED = ("human", "user", "prompt", "query", "question", "instruction", "input", "q", "prompter")
_ANSWERED = (
    "assistant", "gpt", "response", "answer", "output", "completion", "bot", "ai", "model", "chatbot", "chatgpt",
    "solution", "reply", "a",
)  # fmt: skip
_SOLUTION = ("<|begin_of_solution|>", "<|end_of_solution|>")


@dataclass(frozen=True)
class Reading:
    """How turns are read: the keys that the config names, and whether the source's answers matter (class A).

    Class B never needs them: an answer that can't be read is then an empty one. `changes` collects names of CHANGES.
    """

    role_key: str | None = None
    content_key: str | None = None
    answers: bool = True
    changes: set[str] = field(default_factory=set)


def to_messages(turns: Any, reading: Reading | None = None) -> list[Message]:
    """Messages of a list of turns: dicts of role and content, [role, text], pairs of question and answer, or texts.

    Raises Defect when it is none of these, or a role or content is unknown.
    """
    reading = reading or Reading()
    if isinstance(turns, str):
        turns = _parse_list(turns)
    if isinstance(turns, dict):
        turns = _rows(turns, reading)
    if not isinstance(turns, list) or not turns:
        raise Defect("bad_messages", f"expected a list of turns, found {kind_name(turns)}")
    turns = _flat(turns)
    roles_first = _roles_first(turns)
    messages: list[Message] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append(Message("user", turn))
        elif isinstance(turn, list) and len(turn) == 2 and roles_first:
            messages += _turn(turn[0], {"content": turn[1]}, reading, messages)
        elif isinstance(turn, list) and len(turn) == 2:
            messages += [Message("user", text_of(turn[0])[0]), _answer(turn[1], {}, reading)]
        elif isinstance(turn, dict):
            messages += _of_dict(turn, reading, messages)
        else:
            raise Defect("bad_messages", f"a turn is {kind_name(turn)}")
    return messages


def _joined(before: list[Message], call: Message) -> list[Message]:
    """[] for a turn of calls that belongs to the answer before it, several calls or text and a call; else the turn."""
    last = before[-1] if before else None
    if last is None or last.role != "assistant":
        return [call]
    last.tool_calls = tool_calls.joined(last.tool_calls, call.tool_calls)
    return []


def _parse_list(text: str) -> Any:
    """A conversation that a CSV cell or a careless export holds as JSON text."""
    try:
        return read_literal(text)
    except NotJson:
        raise Defect("bad_messages", "the conversation is a text that is not JSON") from None


def _rows(turns: dict, reading: Reading) -> list[dict]:
    """One turn, or turns that lie in columns, as older versions of `datasets` save a sequence of them."""
    given = {key: value for key, value in turns.items() if value is not None}
    role = first_of(given, (reading.role_key,) if reading.role_key else ROLE_KEYS)
    if not isinstance(role, list) or not all(isinstance(one, list) and len(one) == len(role) for one in given.values()):
        return [turns]
    return [{key: column[row] for key, column in given.items()} for row in range(len(role))]


def _flat(turns: list) -> list:
    """The turns of a conversation that lies one list deeper: alone, or in rounds of two turns with roles."""
    if not all(isinstance(turn, list) and turn and all(isinstance(one, dict) for one in turn) for turn in turns):
        return turns
    if len(turns) == 1:
        return turns[0]
    if all(len(turn) == 2 and [_role_of(one) for one in turn] == ["user", "assistant"] for turn in turns):
        return [one for turn in turns for one in turn]
    raise Defect("bad_messages", "the row holds several conversations")


def _role_of(turn: dict) -> str | None:
    role = first_of(turn, ROLE_KEYS)
    return ROLES.get(role.strip().lower()) if isinstance(role, str) else None


def _roles_first(turns: list) -> bool:
    """Whether lists of two are [role, text], not [question, answer]. Raises Defect when some are and some are not."""
    pairs = [turn for turn in turns if isinstance(turn, list) and len(turn) == 2]
    known = [isinstance(pair[0], str) and pair[0].strip().lower() in ROLES for pair in pairs]
    if any(known) and not all(known):
        raise Defect("bad_messages", "some lists of two begin with a role, others don't")
    return any(known)


def _of_dict(turn: dict, reading: Reading, before: list[Message]) -> list[Message]:
    role = first_of(turn, (reading.role_key,) if reading.role_key else ROLE_KEYS)
    kind = turn.get("type")
    if role is None and isinstance(kind, str) and kind in ROLES and "content" in turn:  # LangChain's messages
        role = kind
    if role is not None:
        return _turn(role, turn, reading, before)
    pair = pair_in(turn, reading)
    if pair is not None:
        return pair
    named = [key for key in turn if isinstance(key, str) and key.lower() in ROLES and turn[key] is not None]
    if len(named) == 1:  # {"user": "..."}, {"assistant": "..."}
        return _turn(named[0], {"content": turn[named[0]]}, reading, before)
    raise Defect("unknown_role", f"a turn has no role, its keys are {', '.join(map(str, turn))[:100]}")


def pair_in(turn: dict, reading: Reading) -> list[Message] | None:
    """Question and answer (perhaps null) under two names of their own; None when there are none."""
    values = {key.lower(): value for key, value in turn.items() if isinstance(key, str)}
    asked = next((key for key in _ASKED if values.get(key) is not None), None)
    answered = next((key for key in _ANSWERED if values.get(key) is not None), None)
    answered = answered or next((key for key in _ANSWERED if key in values), None)
    if asked is None or answered is None:
        return None
    question = text_of(values[asked])[0]
    if asked == "instruction" and isinstance(values.get("input"), str) and values["input"].strip():
        question = f"{question}\n\n{values['input']}"
    messages = [Message("user", question)]
    if isinstance(values.get("system"), str) and values["system"].strip():
        messages.insert(0, Message("system", values["system"]))
    if values[answered] is not None:
        messages.append(_answer(values[answered], turn, reading))
    return messages


def _turn(role: Any, turn: dict, reading: Reading, before: list[Message]) -> list[Message]:
    """The messages that a turn adds to those `before` it.

    One, but for calls that join the answer before them, and results of tools that are parts of a user's turn (Anthropic).
    """
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise Defect("unknown_role", f"role {str(role)[:60]!r}")
    value = first_of(turn, (reading.content_key,) if reading.content_key else CONTENT_KEYS)
    if known == "call":
        return _joined(before, _calling(Message("assistant", ""), value, reading))
    if known == "assistant":
        return [_answer(value, turn, reading)]
    if known == "tool":
        return _results(turn, value)
    content = content_of(value)
    if content.calls:
        raise Defect("unknown_content", f"a call of a tool in a turn of {known}")
    said = [Message(known, content.text)] if content.text or not content.results else []
    return [_result(part) for part in content.results] + said


def _results(turn: dict, value: Any) -> list[Message]:
    """A tool's turn. What is neither a text nor parts of one is its result as JSON."""
    try:
        content = content_of(value)
    except Defect as defect:
        if defect.reason == "media":
            raise
        return [tool_calls.result_turn(turn, tool_calls.result_text(value))]
    if content.results:
        return [_result(part) for part in content.results]
    return [tool_calls.result_turn(turn, content.text)]


def _result(part: dict) -> Message:
    value = first_of(part, ("content", "output", "result", "value", "text"))
    try:
        text = text_of(value)[0]
    except Defect:
        text = tool_calls.result_text(value)
    return tool_calls.result_turn(part, text)


def _answer(value: Any, turn: dict, reading: Reading) -> Message:
    """An assistant's turn, whose `value` is its content."""
    message = Message("assistant", "")
    try:
        content = content_of(value)
        message.content, message.reasoning = content.text, _reasoning(turn, content)
        if reading.answers:
            message.trainable, odd = weights.learnt(turn)
            if odd:
                reading.changes.add("turn_weights_ignored")
    except Defect:
        if reading.answers:
            raise
        content = Content()
    calls = turn.get("tool_calls") or turn.get("function_call") or content.calls
    if isinstance(calls, list | dict | str) and calls:
        return _calling(message, calls, reading)
    return message


def _reasoning(turn: dict, content: Content) -> str | None:
    value = first_of(turn, REASONING_KEYS)
    if value is not None and not isinstance(value, str):
        raise Defect("unknown_content", f"the reasoning is {kind_name(value)}")
    return value or content.reasoning or None


def _calling(message: Message, calls: Any, reading: Reading) -> Message:
    try:
        message.tool_calls = tool_calls.to_calls(calls)
    except Defect:
        if reading.answers:
            raise
        message.tool_calls = tool_calls.UNREADABLE
    return message


def split_thought(message: Message) -> None:
    """Move a thought that an answer holds inline, in tags, to `reasoning`. Raises Defect `unclosed_reasoning`.

    Blank lines around the tags go, as the templates that render them put their own.
    """
    try:
        found = thoughts.split(message.content)
    except thoughts.UnclosedThought as error:
        raise Defect("unclosed_reasoning", str(error)) from None
    if found is not None:
        message.content = _unwrapped(found[1])
        message.reasoning = message.reasoning or found[0] or None


def _unwrapped(answer: str) -> str:
    inner = answer.strip()
    if inner.startswith(_SOLUTION[0]) and inner.endswith(_SOLUTION[1]):
        return inner.removeprefix(_SOLUTION[0]).removesuffix(_SOLUTION[1]).strip("\n")
    return answer
