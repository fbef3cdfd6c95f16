"""Calls of tools, their results and their definitions, brought to OpenAI's form, whatever form a source has them in."""

import json
import re
from typing import Any

from scripts.lib.core import exact_json
from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.contents import first_of
from scripts.lib.prompts.sources.literals import read_literal

_ARGUMENTS = ("arguments", "parameters", "input", "args")
_IDS = ("id", "call_id", "tool_call_id", "tool_use_id", "toolCallId")
# Calls and results that stand as text inside a turn (Hermes, glaive).
_TAGGED_CALL = re.compile(
    r"<(tool_call|functioncall|function_call)>\s*(.*?)\s*(?:</\1>|<\|endoftext\|>|(?=<\1>)|\Z)", re.DOTALL
)
_TAGGED_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*(?:</tool_response>|(?=<tool_response>)|\Z)", re.DOTALL)
_TOOL_LIST = re.compile(r"<tools>.*?</tools>", re.DOTALL)
# How other models are told of tools and of the way in which they call them, inside a system turn (Hermes, Qwen).
_TOOL_PROMPT = re.compile(
    r"(?:# Tools\b|You are a function calling AI model\b|You are provided with function signatures\b)"
    r".*?<tools>.*?</tools>.*<tool_call>.*</tool_call>",
    re.DOTALL,
)
UNREADABLE = "[]"  # calls of an answer that class B does not use


def to_calls(value: Any) -> str:
    """JSON text of an OpenAI-style list of tool calls. Raises Defect `bad_tool_call`."""
    if isinstance(value, str):
        tagged = _TAGGED_CALL.fullmatch(value.strip())
        value = _parsed(tagged[2] if tagged else value)
    calls = [_call(call) for call in (value if isinstance(value, list) else [value])]
    if not calls:
        raise Defect("bad_tool_call", "an empty list of calls")
    return json_text(calls)


def joined(first: str | None, second: str | None) -> str | None:
    """JSON text of both lists of calls."""
    if first is None or second is None:
        return first or second
    return json_text([*parse_json(first), *parse_json(second)])


def _parsed(text: str) -> Any:
    try:
        return read_literal(text)
    except NotJson:
        raise Defect("bad_tool_call", f"not JSON: {text[:60]!r}") from None


def _call(call: Any) -> dict:
    """One call. Its own fields stay as they are, but that arguments are an object, or JSON text of one."""
    if isinstance(call, str):
        call = _parsed(call)
    if isinstance(call, dict):
        for inner in ("value", "tool_call", "function_call"):  # a part that holds the call
            if call.get("function") is None and call.get("name") is None and call.get(inner) is not None:
                return _call(call[inner])
        name = first_of(call, ("name", "toolName"))
        if isinstance(call.get("function"), str) and name is None:
            name = call["function"]
        if isinstance(name, str) and not isinstance(call.get("function"), dict):
            function = {"name": name, "arguments": first_of(call, _ARGUMENTS) or {}}
            own = first_of(call, _IDS)
            call = ({"id": own} if isinstance(own, str) else {}) | {"type": "function", "function": function}
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise Defect("bad_tool_call", "a call without a function")
    function = call["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise Defect("bad_tool_call", "a call without a name")
    arguments = _arguments(function.get("arguments"))
    if arguments is function.get("arguments"):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _arguments(value: Any) -> Any:
    """The arguments as they are: an object, JSON text of one, nothing, or text that a model garbled.

    Only Python's way of writing an object is read here, since no template does. Raises Defect for JSON of anything else.
    """
    if value is None or isinstance(value, dict) or (isinstance(value, str) and not value.strip()):
        return value
    try:
        found, kept = (parse_json(value) if isinstance(value, str) else value), value
    except NotJson:
        try:
            found = kept = _parsed(value)
        except Defect:
            return value
    if not isinstance(found, dict | None):
        raise Defect("bad_tool_call", f"arguments that are no object: {str(value)[:60]!r}")
    return None if found is None else kept


def read_calls_in_texts(messages: list[Message], tools: str | None, answers: bool) -> list[Message]:
    """The conversation with calls and results that stand as text in tags as what they are.

    Only where tools are in play: given, listed in the system turn, or answered by a turn of a tool. Elsewhere people
    talk about such tags. Raises Defect `bad_tool_call`; not for class B, which has no use for the calls (`answers`).
    """
    listed = bool(messages) and messages[0].role == "system" and bool(_TOOL_LIST.search(messages[0].content))
    read: list[Message] = []
    for number, message in enumerate(messages):
        following = messages[number + 1] if number + 1 < len(messages) else None
        answered = following is not None and _is_result(following)
        if message.role == "assistant" and message.tool_calls is None and (tools or listed or answered):
            _take_calls(message, answers)
            read.append(message)
        elif _is_result(message) and read and (read[-1].tool_calls is not None or read[-1].role == "tool"):
            read += _results_in(message)
        else:
            read.append(message)
    return read


def without_tool_prompt(system: str) -> str:
    """A system turn without another model's list of tools and its way of calling them.

    Where the tools are given apart, the target's own template tells it both.
    """
    return _TOOL_PROMPT.sub("", system).strip() if _TOOL_PROMPT.search(system) else system


def _is_result(message: Message) -> bool:
    text = message.content.strip()
    tagged = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message.role == "tool" or (message.role == "user" and tagged)


def _take_calls(message: Message, answers: bool) -> None:
    found = list(_TAGGED_CALL.finditer(message.content))
    if not found:
        return
    rest = _TAGGED_CALL.sub("", message.content[found[0].start() :])
    try:
        if rest.strip():
            raise Defect("bad_tool_call", f"text after a call: {rest.strip()[:60]!r}")
        message.tool_calls = to_calls([_parsed(match[2]) for match in found])
    except Defect:
        if answers:
            raise
        message.tool_calls = UNREADABLE
    message.content = message.content[: found[0].start()].rstrip()


def _results_in(message: Message) -> list[Message]:
    """The results of a tool's turn, without the tags that templates put themselves; several calls have several."""
    texts = [match[1] for match in _TAGGED_RESULT.finditer(message.content)]
    if not texts:
        return [message]
    return [
        Message("tool", text, name=message.name or _name_in(text), tool_call_id=message.tool_call_id) for text in texts
    ]


def _name_in(text: str) -> str | None:
    try:
        value = _parsed(text)
    except Defect:
        return None
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and name else None


def result_turn(turn: dict, text: str) -> Message:
    """A tool's turn with the call that it answers, and its tool's name."""
    own = first_of(turn, ("tool_call_id", "tool_use_id", "call_id", "toolCallId"))
    name = first_of(turn, ("name", "tool_name", "toolName"))
    return Message(
        "tool",
        text,
        name=name if isinstance(name, str) and name else None,
        tool_call_id=own if isinstance(own, str) and own else None,
    )


def result_text(value: Any) -> str:
    """A result that is no text as JSON text, which is how APIs hand it to a model."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def to_tools(value: Any) -> str | None:
    """JSON text of OpenAI-style tool definitions: a list, an object, or JSON text of either. Raises Defect `bad_tools`."""
    value = _definition(value)
    if not value:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise Defect("bad_tools", "the tools are not a list of objects")
    found = [_definition(tool) for tool in value]
    if not all(isinstance(tool, dict) for tool in found):
        raise Defect("bad_tools", "the tools are not a list of objects")
    return json_text([tool if "function" in tool else {"type": "function", "function": tool} for tool in found])


def _definition(value: Any) -> Any:
    """A definition, or a list of them, that may stand as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except NotJson:
        raise Defect("bad_tools", "the tools are a text that is not JSON") from None


def json_text(value: Any) -> str:
    """JSON of tools. Raises Defect for what JSON has no form for: bytes and dates of Parquet, NaN, lone surrogates."""
    try:
        return exact_json.json_text(value)
    except NotJson as error:
        raise Defect("unknown_content", f"tools that are not JSON: {error}") from None
