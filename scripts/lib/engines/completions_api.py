"""Reading `/chat/completions` bodies: SGLang's with ids, hosted ones with text."""

from typing import Any

from scripts.lib.engines import sse
from scripts.lib.engines.base import Failure, Reply
from scripts.lib.engines.errors import error_in_200, read_error
from scripts.lib.engines.values import as_count, as_object, as_objects, read_object, shown

_FINISHED = ("stop", "length", "content_filter", "tool_calls")


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
    finish = choice.get("finish_reason")
    if finish == "function_call":
        choice["finish_reason"] = finish = "tool_calls"
    if finish not in _FINISHED:
        return Failure("retry", f"no finish reason but {shown(finish)}", billed=True)
    return body, choice, as_object(choice.get("message"))


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
