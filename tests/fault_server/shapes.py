"""One finished generation in the shape of each protocol, as pure functions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

PROTOCOLS = ("llamacpp", "sglang", "sglang_chat", "vllm", "vllm_chat", "openrouter")
CHAT = ("sglang_chat", "vllm_chat", "openrouter")
OPENAI = (*CHAT, "vllm")
EXACT = ("llamacpp", "sglang", "sglang_chat", "vllm", "vllm_chat")
PRICE = (1e-6, 2e-6)  # US dollars per prompt and output token, of the hosted API


@dataclass
class Generation:
    """A finished answer, before it takes a wire shape."""

    prompt_ids: list[int]
    ids: list[int]  # the stop token included when finish is `stop`
    text: str
    finish: str = "stop"  # stop | length
    reasoning: str | None = None
    model: str = "target"
    request_id: str = "r0"
    stop_id: int = 2
    states: list[list[float]] | None = None  # hidden states of the prompt, where they were asked for
    seed: int | None = None  # of the request
    key: str = "sk-an-echoed-key"  # that came with the request


@dataclass
class Wire:
    """A reply as it goes over the wire.

    `delivery`: `whole`; `drop` (connection closed without a byte); `reset` (half a chunked body, then RST); `short`
    (fewer bytes than Content-Length says); `stall` (headers and half the body, then silence); `silence` (nothing at
    all until the client leaves); `late` (the answer is made, and sent too late); `split` (chunks end inside
    characters); `doubled`, `doubled_late` (whole, and once more on the same connection); `swapped` (with the reply to
    another request that is under way).
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    delivery: str = "whole"


def usage(generation: Generation) -> dict[str, Any]:
    prompt, output = len(generation.prompt_ids), len(generation.ids)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def reply(protocol: str, generation: Generation) -> dict[str, Any]:
    """The JSON of a good reply, as the server of `protocol` writes it."""
    stopped = generation.finish == "stop"
    if protocol == "llamacpp":
        return {
            "model": generation.model,
            "tokens": generation.ids,
            "stop_type": "eos" if stopped else "limit",
            "tokens_evaluated": len(generation.prompt_ids),
            "tokens_predicted": len(generation.ids),
            **({} if generation.seed is None else {"generation_settings/seed": generation.seed}),
        }
    if protocol == "sglang":
        finish = {"type": "stop", "matched": generation.stop_id}
        states = {} if generation.states is None else {"hidden_states": [generation.states]}
        return {
            "text": generation.text,
            "output_ids": generation.ids,
            "meta_info": {
                "id": generation.request_id,
                "finish_reason": finish if stopped else {"type": "length", "length": len(generation.ids)},
                "prompt_tokens": len(generation.prompt_ids),
                "completion_tokens": len(generation.ids),
                "cached_tokens": 0,
                **states,
            },
        }
    body: dict[str, Any] = {
        "id": generation.request_id,
        "object": "text_completion" if protocol == "vllm" else "chat.completion",
        "created": 1_700_000_000,
        "model": generation.model,
        "usage": usage(generation),
    }
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": generation.finish}
    message: dict[str, Any] = {"role": "assistant", "content": generation.text}
    if protocol == "sglang_chat":
        message |= {"reasoning_content": generation.reasoning, "tool_calls": None}
        choice |= {
            "message": message,
            "matched_stop": generation.stop_id if stopped else None,
            "prompt_token_ids": generation.prompt_ids,
            "response_token_ids": generation.ids,
        }
    elif protocol == "vllm_chat":
        message |= {"reasoning": generation.reasoning, "tool_calls": []}
        choice |= {"message": message, "stop_reason": None, "token_ids": generation.ids}
        body["prompt_token_ids"] = generation.prompt_ids
    elif protocol == "vllm":
        choice |= {
            "text": generation.text,
            "stop_reason": None,
            "prompt_token_ids": generation.prompt_ids,
            "token_ids": generation.ids,
        }
    elif protocol == "openrouter":
        message |= {"refusal": None, "reasoning": generation.reasoning}
        choice |= {"message": message, "native_finish_reason": generation.finish}
        body["provider"] = "Alpha"
        body["usage"]["cost"] = PRICE[0] * len(generation.prompt_ids) + PRICE[1] * len(generation.ids)
    else:
        raise ValueError(f"no protocol {protocol!r}")
    return {**body, "choices": [choice]}


def good(protocol: str, generation: Generation) -> Wire:
    """A good reply."""
    return Wire(orjson.dumps(reply(protocol, generation)))


def error(protocol: str, status: int, message: str, kind: str = "BadRequestError", **more: Any) -> Wire:
    """An error in the shape of the protocol: flat in SGLang's OpenAI routes, nested elsewhere."""
    details = {"message": message, "type": kind, "param": None, "code": status, **more}
    if protocol == "sglang_chat":
        return Wire(orjson.dumps({"object": "error", **details}), status)
    if protocol == "openrouter":
        details = {"message": message, "code": status, **more}
    return Wire(orjson.dumps({"error": details}), status)


def edited(protocol: str, generation: Generation, edit: Callable[[dict], Any]) -> Wire:
    """A good reply after `edit` has changed its JSON in place."""
    body = reply(protocol, generation)
    edit(body)
    return Wire(orjson.dumps(body))


def set_finish(protocol: str, body: dict, finish: str | None) -> None:
    if protocol == "llamacpp":
        body["stop_type"] = "none"
    elif protocol == "sglang":
        body["meta_info"]["finish_reason"] = finish and {"type": finish, "message": "Aborted"}
    else:
        body["choices"][0]["finish_reason"] = finish


def set_text(protocol: str, body: dict, content: str | None, **fields: Any) -> None:
    """Change the texts of a reply; its ids stay."""
    if protocol == "sglang":
        body["text"] = content or ""
    elif protocol == "vllm":
        body["choices"][0]["text"] = content or ""
    elif protocol != "llamacpp":
        body["choices"][0]["message"].update({"content": content, **fields})


def stream(
    generation: Generation, *, finish: str | None, done: bool, comments: bool = False, first: Sequence[Any] = ()
) -> Wire:
    """The answer as server-sent events, though nobody asked for a stream: some proxies do that."""
    chunk = {"id": generation.request_id, "object": "chat.completion.chunk", "model": generation.model}
    events = [{"delta": {"content": part}, "finish_reason": None} for part in first]
    events += [{"delta": {"content": piece}, "finish_reason": None} for piece in re.split("(?= )", generation.text)]
    if finish or not done:
        events[-1]["finish_reason"] = finish
    lines = [b": OPENROUTER PROCESSING"] if comments else []
    for event in events:
        lines.append(b"data: " + orjson.dumps({**chunk, "choices": [{"index": 0, **event}]}))
        if comments:
            lines.append(b": OPENROUTER PROCESSING")
    if done:
        lines.append(b"data: [DONE]")
    return Wire(b"\n\n".join(lines) + b"\n\n", headers={"Content-Type": "text/event-stream"})
