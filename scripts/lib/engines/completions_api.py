"""Reading `/chat/completions` bodies: SGLang's with ids, hosted ones with text."""

import re
from typing import Any

from scripts.lib.engines import sse
from scripts.lib.engines.base import Failure, Reply
from scripts.lib.engines.errors import error_in_200, read_error
from scripts.lib.engines.values import as_count, as_object, as_objects, as_text, odd_stop, read_object, shown

_NOT_A_NUMBER = re.compile(r"\bnan\b", re.IGNORECASE)
_BROKEN = ("error", "repetition")  # of vLLM 0.32; `abort` is what ends a request whose client has gone
_TEXT_PARTS, _THOUGHT_PARTS = ("text", "output_text"), ("thinking", "reasoning", "thought")
# Why an answer ended, in the words of servers and gateways, in lower case.
_FINISHED = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "stop_token", "end_turn"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_new_tokens", "max_output_tokens"), "length"),
    **dict.fromkeys(("content_filter", "safety", "refusal", "recitation", "prohibited_content"), "content_filter"),
    **dict.fromkeys(("tool_calls", "function_call", "tool_use"), "tool_calls"),
}


def read_choice(reply: Reply, now: float) -> tuple[dict, dict, dict] | Failure:
    """(body, first choice, its message) of a finished answer, else the Failure.

    `abort`, `error` and no finish reason at all are not answers, with status 200 or not (vllm issue
    57082, sglang issues 4550 and 6674).
    """
    if reply.status != 200:
        return read_error(reply.status, reply.headers, reply.body, now)
    body = sse.fold(reply.body) if sse.is_stream(reply) else read_object(reply)
    if isinstance(body, Failure):
        return body
    if failure := error_in_200(body, reply, now):
        return failure
    choices = as_objects(body.get("choices"))
    if not choices:
        return Failure("retry", "HTTP 200 without choices", billed=True)
    choice = choices[0]
    # Only this of a hosted server: it may have stop texts of its own.
    if _NOT_A_NUMBER.search(as_text(choice.get("matched_stop")) or "") and (
        failure := odd_stop(choice["matched_stop"])
    ):
        return failure
    finish = choice.get("finish_reason")
    meaning = _FINISHED.get((as_text(finish) or "").lower())
    if meaning is None:
        return Failure("retry", f"no finish reason but {shown(finish)}", billed=True, odd=finish in _BROKEN)
    choice["finish_reason"] = meaning
    return body, choice, as_object(choice.get("message"))


def texts_of(message: dict[str, Any]) -> tuple[str, str | None] | Failure:
    """(content, thought) of an answer; a Failure when its content is of a kind that nothing is known of.

    Content is text or a list of parts (Mistral's documentation of reasoning: `text` and `thinking`, whose text is a
    list in the list; vercel/ai issue 13703).
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    said: list[str] = []
    thought: list[str] = []
    for part in parts:
        if part is None:
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        value = part if isinstance(part, str) else _part_text(part)
        if value is None or kind not in (*_TEXT_PARTS, *_THOUGHT_PARTS):
            reason = f"the content holds what is no text: {shown(part)}"
            return Failure("retry", reason, billed=True, most_attempts=2)
        (thought if kind in _THOUGHT_PARTS else said).append(value)
    return "".join(said), reasoning_of(message) or "".join(thought) or None


def _part_text(part: Any) -> str | None:
    """The text of a part, which may be a list of parts itself; None where there is none."""
    if not isinstance(part, dict):
        return None
    value = next(
        (part[name] for name in ("text", "thinking", "reasoning", "content") if part.get(name) is not None), None
    )
    if isinstance(value, list):
        texts = [one if isinstance(one, str) else as_object(one).get("text") for one in value]
        known = [text for text in texts if isinstance(text, str)]
        return "".join(known) if len(known) == len(texts) else None
    return value if isinstance(value, str) else None


def reasoning_of(message: dict[str, Any]) -> str | None:
    """The thought, under any of the names that servers give it.

    `reasoning_content` (SGLang, vLLM before 0.12), `reasoning` (vLLM, OpenRouter), `reasoning_details`.
    """
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str) and message[name]:
            return message[name]
    texts = [part.get("text") for part in as_objects(message.get("reasoning_details"))]
    return "".join(text for text in texts if isinstance(text, str)) or None


def stop_id(choice: dict[str, Any]) -> int | None:
    """The id of the stop token that the server matched, when it tells one."""
    matched = as_count(choice.get("matched_stop"))
    return as_count(choice.get("stop_reason")) if matched is None else matched


def wire_messages(messages: list, *, reasoning: bool = True) -> list[dict[str, Any]]:
    """Messages as chat APIs take them; with `reasoning` under both names in use."""
    wired = []
    for message in messages:
        one = message.for_template()
        if not reasoning:
            one.pop("reasoning", None)
            one.pop("reasoning_content", None)
        wired.append(one)
    return wired
