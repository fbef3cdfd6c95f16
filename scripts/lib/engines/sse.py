"""A stream of server-sent events, folded into the body that the same server sends without streaming.

Never asked for, but gateways stream all the same. Tolerates comment lines (`: OPENROUTER PROCESSING`),
errors as events, and streams that just end: what lacks a finish reason is then no answer.
"""

from typing import Any

import orjson

from scripts.lib.engines.base import Failure, Reply
from scripts.lib.engines.values import as_object, as_objects

_TEXTS = ("content", "reasoning_content", "reasoning")
_LISTS = ("reasoning_details", "tool_calls")


def is_stream(reply: Reply) -> bool:
    """Whether a reply is an event stream."""
    return "event-stream" in reply.headers.get("content-type", "") or reply.body[:5] == b"data:"


def fold(body: bytes) -> dict[str, Any] | Failure:
    """The chat body that the events add up to."""
    whole: dict[str, Any] = {}
    choice: dict[str, Any] = {"finish_reason": None}
    texts: dict[str, list[str]] = {}
    lists: dict[str, list] = {}
    chosen = False
    for line in body.splitlines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if not data or data == b"[DONE]":
            continue
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return Failure("retry", "the stream broke off within an event", billed=True)
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            return {"error": event["error"]}
        choices = as_objects(event.pop("choices", None))
        whole.update({key: value for key, value in event.items() if value is not None})
        if not choices:
            continue
        chosen = True
        part = choices[0]
        delta = as_object(part.get("delta"))
        if isinstance(delta.get("content"), list):
            # From then on parts, also those that come as plain text (Mistral: the thought as lists, then the answer).
            lists.setdefault("content", [*texts.pop("content", [])]).extend(delta["content"])
        elif "content" in lists and isinstance(delta.get("content"), str):
            lists["content"].append(delta.pop("content"))
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                texts.setdefault(name, []).append(delta[name])
        for name in _LISTS:
            if isinstance(delta.get(name), list):
                lists.setdefault(name, []).extend(delta[name])
        for key, value in part.items():
            if key != "delta" and value is not None:
                choice[key] = value
    if not chosen:
        return Failure("retry", "the stream ended without an answer", billed=True)
    message = {name: "".join(parts) for name, parts in texts.items()} | lists
    return {**whole, "choices": [{**choice, "message": message}]}
