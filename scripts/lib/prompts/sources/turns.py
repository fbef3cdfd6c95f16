"""The turns of a conversation as people store them, brought to the four roles that chat templates know.

An unknown role or content is a defect: templates would drop such a turn, or render it as something else, in silence.
"""

import re
from typing import Any

from scripts.lib.core.exact_json import NotJson, json_text, read_json
from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.target import thoughts

ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "bot": "assistant", "ai": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool",
    "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
PAIRS = (
    ("human", "assistant"), ("user", "assistant"), ("human", "gpt"), ("prompt", "response"), ("query", "response"),
    ("question", "answer"), ("instruction", "output"), ("prompt", "completion"),
)  # fmt: skip
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking", "thought", "reasoning_content")
_MEDIA = re.compile(r"image|video|audio|file")
_SOLUTION = ("<|begin_of_solution|>", "<|end_of_solution|>")
_CALL_TAG = re.compile(r"\s*<(tool_call|functioncall)>\s*(.*?)\s*(?:</\1>)?\s*", re.DOTALL)


def first_of(row: dict, names: tuple[str, ...]) -> Any:
    """The first value among `names` that is not null; None when there is none."""
    for name in names:
        value = row.get(name)
        if value is not None:
            return value
    return None


def to_messages(turns: Any, role_key: str | None = None, content_key: str | None = None) -> list[Message]:
    """Messages of a list of turns: dicts of role and content, pairs of question and answer, or the user's texts.

    Raises Defect when it is none of these, or a role or content is unknown.
    """
    if isinstance(turns, str):
        turns = _parse_list(turns)
    if isinstance(turns, dict):
        turns = [turns]
    if not isinstance(turns, list) or not turns:
        raise Defect("bad_messages", f"expected a list of turns, found {_name(turns)}")
    messages: list[Message] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append(Message("user", turn))
        elif isinstance(turn, list) and len(turn) == 2:
            messages += [Message("user", text_of(turn[0])[0]), Message("assistant", text_of(turn[1])[0])]
        elif not isinstance(turn, dict):
            raise Defect("bad_messages", f"a turn is {_name(turn)}")
        elif (role := first_of(turn, (role_key,) if role_key else ROLE_KEYS)) is not None:
            messages.append(_to_message(role, turn, (content_key,) if content_key else CONTENT_KEYS))
        elif (pair := _pair(turn)) is not None:
            messages += pair
        else:
            raise Defect("unknown_role", f"a turn has no role, its keys are {', '.join(map(str, turn))[:100]}")
    return messages


def _parse_list(text: str) -> Any:
    """A conversation that a CSV cell or a careless export holds as JSON text."""
    try:
        return read_json(text)
    except NotJson:
        raise Defect("bad_messages", "the conversation is a text that is not JSON") from None


def _pair(turn: dict) -> list[Message] | None:
    for question, answer in PAIRS:
        if turn.get(question) is not None and answer in turn:
            messages = [Message("user", text_of(turn[question])[0])]
            if turn[answer] is not None:
                messages.append(Message("assistant", text_of(turn[answer])[0]))
            return messages
    return None


def _to_message(role: Any, turn: dict, content_keys: tuple[str, ...]) -> Message:
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise Defect("unknown_role", f"role {str(role)[:60]!r}")
    content, reasoning = text_of(first_of(turn, content_keys))
    if known == "call":
        return Message("assistant", "", tool_calls=_calls(content))
    message = Message(known, content)
    if known == "assistant":
        field = first_of(turn, REASONING_KEYS)
        if field is not None and not isinstance(field, str):
            raise Defect("unknown_content", f"the reasoning is {_name(field)}")
        message.reasoning = field or reasoning or None
        calls = turn.get("tool_calls")
        if calls:
            message.tool_calls = _calls(calls)
        elif isinstance(turn.get("function_call"), dict):
            message.tool_calls = _calls(turn["function_call"])
    return message


def text_of(content: Any) -> tuple[str, str]:
    """(text, reasoning) of a content: a string, null, or parts with `text` or `value`. Raises Defect."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    thoughts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Defect("unknown_content", f"the content is {_name(part)}")
        kind = part.get("type")
        if (kind is not None and _MEDIA.search(str(kind))) or any(part.get(key) for key in ("image", "image_url")):
            raise Defect("media", f"a part of type {kind}")
        value = first_of(part, ("text", "value", *_REASONING_PARTS))
        if value is not None and not isinstance(value, str):
            raise Defect("unknown_content", f"a part of type {kind} holds {_name(value)}")
        if kind in _TEXT_PARTS and value is not None:
            texts.append(value)
        elif kind in _REASONING_PARTS:
            thoughts.append(value or "")
        else:
            raise Defect("unknown_content", f"a part of type {kind!r}"[:100])
    return "".join(texts), "".join(thoughts)


def _calls(value: Any) -> str:
    """JSON text of an OpenAI-style list of tool calls. Raises Defect `bad_tool_call`."""
    if isinstance(value, str):
        tagged = _CALL_TAG.fullmatch(value)
        try:
            value = read_json(tagged[2] if tagged else value)
        except NotJson:
            raise Defect("bad_tool_call", f"not JSON: {value[:60]!r}") from None
    calls = value if isinstance(value, list) else [value]
    normalised = []
    for call in calls:
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            call = {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise Defect("bad_tool_call", "a call without a function")
        normalised.append(call)
    if not normalised:
        raise Defect("bad_tool_call", "an empty list of calls")
    return _json_text(normalised)


def to_tools(value: Any) -> str | None:
    """JSON text of OpenAI-style tool definitions, given as a list or as JSON text. Raises Defect `bad_tools`."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = read_json(value)
        except NotJson:
            raise Defect("bad_tools", "the tools are a text that is not JSON") from None
    if not value:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Defect("bad_tools", "the tools are not a list of objects")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    return _json_text(wrapped)


def _json_text(value: Any) -> str:
    try:
        return json_text(value)
    except NotJson as error:  # bytes of Parquet, NaN, lone surrogates
        raise Defect("unknown_content", f"tools that are not JSON: {error}") from None


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


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
