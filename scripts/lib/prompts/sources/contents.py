"""What a turn holds: a text, or parts of text, thought, calls of tools and their results, in the shapes of many APIs."""

import re
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.prompts.defects import Defect

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking", "thought", "reasoning_content")
# LLaMA-Factory, Anthropic, OpenAI's responses, the AI SDK.
_CALL_PARTS = ("tool_call", "tool_use", "function_call", "tool-call", "function")
_RESULT_PARTS = ("tool_result", "tool_response", "function_call_output", "tool-result")
_MEDIA = re.compile(r"image|video|audio|file")


@dataclass
class Content:
    """The parts of a turn by what they are, each as it came: `calls` and `results` are not looked into."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict] = field(default_factory=list)
    results: list[dict] = field(default_factory=list)


def first_of(row: dict, names: tuple[str, ...]) -> Any:
    """The first value among `names` that is not null; None when there is none."""
    for name in names:
        value = row.get(name)
        if value is not None:
            return value
    return None


def content_of(value: Any) -> Content:
    """What a content says: a string, null, or parts. Raises Defect."""
    if value is None:
        return Content()
    if isinstance(value, str):
        return Content(value)
    content = Content()
    for part in value if isinstance(value, list) else [value]:
        _add(content, part)
    return content


def text_of(value: Any) -> tuple[str, str]:
    """(text, reasoning) of a content that must hold nothing else. Raises Defect."""
    content = content_of(value)
    if content.calls or content.results:
        raise Defect("unknown_content", f"a part of type {(content.calls + content.results)[0].get('type')!r}")
    return content.text, content.reasoning


def _add(content: Content, part: Any) -> None:
    if isinstance(part, str):
        content.text += part
        return
    if not isinstance(part, dict):
        raise Defect("unknown_content", f"the content is {kind_name(part)}")
    kind = part.get("type")
    if kind in _CALL_PARTS:
        content.calls.append(part)
        return
    if kind in _RESULT_PARTS:
        content.results.append(part)
        return
    if (kind is not None and _MEDIA.search(str(kind))) or any(part.get(key) for key in ("image", "image_url")):
        raise Defect("media", f"a part of type {kind}")
    value = first_of(part, ("text", "value", *_REASONING_PARTS))
    if isinstance(value, list) and kind in _REASONING_PARTS:  # Mistral's thoughts are parts themselves
        value = text_of(value)[0]
    if value is not None and not isinstance(value, str):
        raise Defect("unknown_content", f"a part of type {kind} holds {kind_name(value)}")
    if kind in _TEXT_PARTS and value is not None:
        content.text += value
    elif kind in _REASONING_PARTS:
        content.reasoning += value or ""
    else:
        raise Defect("unknown_content", f"a part of type {kind!r}"[:100])


def kind_name(value: Any) -> str:
    """What a value is, in words of a message."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
