"""The ways in which replies go wrong, as pure functions: one definition for the unit tests and the running server.

tests/unit/test_faults.py says for each what the client has to make of it.
"""

import gzip
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from tests.fault_server.shapes import (
    CHAT,
    EXACT,
    OPENAI,
    PROTOCOLS,
    Generation,
    Wire,
    edited,
    error,
    good,
    set_finish,
    set_text,
    stream,
)

# A fault turns a protocol and a finished generation into a reply; None where the protocol can't say it. `dice`
# chooses among variants; `now` is the wall clock.
Fault = Callable[[str, Generation, random.Random, float], Wire | None]
FAULTS: dict[str, Fault] = {}


def fault(name: str, protocols: tuple[str, ...] = PROTOCOLS) -> Callable[[Fault], Fault]:
    def register(make: Fault) -> Fault:
        def limited(protocol: str, generation: Generation, dice: random.Random, now: float) -> Wire | None:
            return make(protocol, generation, dice, now) if protocol in protocols else None

        FAULTS[name] = limited
        return limited

    return register


# --- replies with status 200 that are no answers --------------------------------------------------


@fault("abort_200")
def _(protocol, generation, dice, now):
    cut = replace(generation, ids=generation.ids[: dice.randrange(len(generation.ids))], text=generation.text[:7])
    return edited(protocol, cut, lambda body: set_finish(protocol, body, "abort"))


@fault("finish_null")
def _(protocol, generation, dice, now):
    return edited(protocol, generation, lambda body: set_finish(protocol, body, None))


@fault("no_done", CHAT)
def _(protocol, generation, dice, now):
    return stream(generation, finish=None, done=False)


@fault("error_in_200")
def _(protocol, generation, dice, now):
    metadata = {"raw": "error code: 1015", "provider_name": "Beta"}
    failure = {"message": "Provider returned error", "code": dice.choice([429, 502]), "metadata": metadata}
    body: dict[str, Any] = {"error": failure}
    if protocol in CHAT and dice.random() < 0.5:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None}}
        body |= {"choices": [choice], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}
    return Wire(orjson.dumps(body))


@fault("choices_null", OPENAI)
def _(protocol, generation, dice, now):
    return Wire(orjson.dumps({"id": None, "choices": None, "usage": None}))


@fault("choices_empty", OPENAI)
def _(protocol, generation, dice, now):
    return edited(protocol, generation, lambda body: body.update(choices=[]))


@fault("content_null_stop")
def _(protocol, generation, dice, now):
    # A server that returns ids has the stop token and nothing else.
    nothing = replace(generation, ids=[generation.stop_id], text="", finish="stop", reasoning=None)

    def edit(body: dict) -> None:
        set_text(protocol, body, None)
        if protocol in OPENAI:
            body["usage"]["completion_tokens"] = 0

    return edited(protocol, nothing, edit)


@fault("leading_ws")
def _(protocol, generation, dice, now):
    wire = good(protocol, generation)
    return replace(wire, body=b" \n\r\n\t " * 40 + wire.body)


@fault("sse_comment", ("openrouter",))
def _(protocol, generation, dice, now):
    return stream(generation, finish="stop", done=True, comments=True)


@fault("sse_split_utf8")
def _(protocol, generation, dice, now):
    text = generation.text + " — naïve 漢字 🙂"
    return replace(good(protocol, replace(generation, text=text)), delivery="split")


# --- answers that are not what they seem ------------------------------------------------------------


def thinking(generation: Generation) -> str:
    return generation.reasoning or generation.text


@fault("reasoning_only_length", CHAT)
def _(protocol, generation, dice, now):
    field_name = "reasoning_content" if protocol == "sglang_chat" else "reasoning"
    cut = replace(generation, finish="length", ids=generation.ids[: len(generation.ids) // 3 or 1])
    return edited(protocol, cut, lambda b: set_text(protocol, b, None, **{field_name: thinking(generation)}))


@fault("answer_in_reasoning", CHAT)
def _(protocol, generation, dice, now):
    field_name = "reasoning_content" if protocol == "sglang_chat" else "reasoning"
    return edited(protocol, generation, lambda b: set_text(protocol, b, "", **{field_name: thinking(generation)}))


@fault("reasoning_in_content", CHAT)
def _(protocol, generation, dice, now):
    text = f"{thinking(generation)}</think>{generation.text}"
    return edited(protocol, generation, lambda b: set_text(protocol, b, text, reasoning=None))


@fault("field_reasoning", CHAT)
def _(protocol, generation, dice, now):
    def edit(body: dict) -> None:
        message = body["choices"][0]["message"]
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        middle = len(thinking(generation)) // 2
        parts = thinking(generation)[:middle], thinking(generation)[middle:]
        message["reasoning_details"] = [{"type": "reasoning.text", "text": part} for part in parts]

    return edited(protocol, generation, edit)


@fault("reasoning_ws_stripped", CHAT)
def _(protocol, generation, dice, now):
    return edited(protocol, generation, lambda b: set_text(protocol, b, generation.text.strip()))


@fault("content_parts", CHAT)
def _(protocol, generation, dice, now):
    """Content as a list: Mistral's thought is a list in the list, others write strings (vercel/ai issue 13703)."""
    thought = thinking(generation)
    nested = dice.choice([thought, [{"type": "text", "text": thought}]])
    first = {"type": "thinking", "thinking": nested} if dice.random() < 0.7 else {"type": "reasoning", "text": thought}
    parts: list[Any] = [first, {"type": dice.choice(["text", "output_text"]), "text": generation.text}]
    no_field = {"reasoning": None, "reasoning_content": None}
    return edited(protocol, generation, lambda b: set_text(protocol, b, parts, **no_field))


@fault("content_stream_parts", ("openrouter",))
def _(protocol, generation, dice, now):
    """Thoughts stream as lists, the answer as strings (req_llm issue 742)."""
    thought = [
        {"type": "thinking", "thinking": [{"type": "text", "text": word}]} for word in thinking(generation).split(" ")
    ]
    return stream(generation, finish="stop", done=True, first=[[part] for part in thought[:3]])


@fault("content_unknown", ("openrouter",))
def _(protocol, generation, dice, now):
    odd = [{"type": "image_url", "image_url": {"url": "x"}}], {"parts": 7}, 42, [["nested"]]
    return edited(protocol, generation, lambda b: set_text(protocol, b, dice.choice(odd)))


@fault("unasked_encoding")
def _(protocol, generation, dice, now):
    """A byte order mark, or a body that is compressed though `identity` was asked for."""
    wire = good(protocol, generation)
    if dice.random() < 0.5:
        how = dice.choice(["utf-8-sig", "utf-16", "utf-32"])
        return replace(wire, body=wire.body.decode().encode(how))
    how = dice.choice(["gzip", "deflate", "x-gzip", "identity"])
    body = {"deflate": zlib.compress, "identity": bytes}.get(how, gzip.compress)(wire.body)
    return replace(wire, body=body, headers={**wire.headers, "Content-Encoding": how})


@fault("unknown_encoding")
def _(protocol, generation, dice, now):
    wire = good(protocol, generation)
    return replace(wire, body=b"\x0b\x02\x80" + wire.body[::-1], headers={**wire.headers, "Content-Encoding": "br"})


@fault("max_tokens_ignored", EXACT)
def _(protocol, generation, dice, now):
    ids = generation.ids[:-1] * (1 + 400 // max(1, len(generation.ids) - 1))
    return good(protocol, replace(generation, ids=[*ids, generation.stop_id]))


@fault("eos_in_middle", EXACT)
def _(protocol, generation, dice, now):
    """Speculation that went on after the stop token (sglang issue 31599)."""
    ids = [*generation.ids, *(dice.randrange(1000, 2000) for _ in range(dice.randint(1, 5)))]
    return good(protocol, replace(generation, ids=ids, finish=dice.choice(["stop", "length"])))


@fault("nan_stop", ("sglang", "sglang_chat"))
def _(protocol, generation, dice, now):
    """A token that is no number was replaced by the stop token (sglang, schedule_batch.py: "NaN happened")."""
    cut = replace(generation, ids=[*generation.ids[: len(generation.ids) // 2], generation.stop_id])

    def edit(body: dict) -> None:
        if protocol == "sglang":
            body["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
        else:
            body["choices"][0]["matched_stop"] = "NaN happened"

    return edited(protocol, cut, edit)


@fault("broken_finish", EXACT)
def _(protocol, generation, dice, now):
    """vLLM 0.32 has `error`, `abort` and `repetition` beside `stop` and `length`."""
    cut = replace(generation, ids=generation.ids[: len(generation.ids) // 2])
    return edited(protocol, cut, lambda body: set_finish(protocol, body, dice.choice(["error", "repetition", "abort"])))


@fault("400_duplicate_id", ("sglang", "sglang_chat", "vllm"))
def _(protocol, generation, dice, now):
    """The request of a job before, which the server has not given up yet (sglang, tokenizer_manager.py)."""
    return error(protocol, 400, f"Duplicate request ID detected: {generation.request_id}")


@fault("tool_leak", CHAT)
def _(protocol, generation, dice, now):
    def edit(body: dict) -> None:
        set_text(protocol, body, "", reasoning="I will look it up.")
        body["choices"][0]["finish_reason"] = "tool_calls"

    return edited(protocol, generation, edit)


@fault("tool_calls_loop", CHAT)
def _(protocol, generation, dice, now):
    call = {"id": "c0", "type": "function", "function": {"name": "search", "arguments": "{}"}}

    def edit(body: dict) -> None:
        set_text(protocol, body, "", tool_calls=[call])
        body["choices"][0]["finish_reason"] = "tool_calls"

    return edited(protocol, generation, edit)


@fault("repeat_loop")
def _(protocol, generation, dice, now):
    pattern = generation.ids[:5]
    looped = replace(generation, ids=generation.ids[:-1] + pattern * 40, finish="length", text="once more " * 99)
    return good(protocol, looped)


@fault("nan_bang")
def _(protocol, generation, dice, now):
    # In vLLM id 0, an exclamation mark in most vocabularies.
    return good(protocol, replace(generation, ids=generation.ids[:1] * 200, text="!" * 200, finish="length"))


@fault("stray_tokens", EXACT)
def _(protocol, generation, dice, now):
    ids = [generation.ids[0] + 17, *generation.ids[1:]]
    return good(protocol, replace(generation, ids=ids))


@fault("usage_missing")
def _(protocol, generation, dice, now):
    def edit(body: dict) -> None:
        if protocol == "llamacpp":
            del body["tokens_evaluated"], body["tokens_predicted"]
        elif protocol == "sglang":
            del body["meta_info"]["prompt_tokens"], body["meta_info"]["completion_tokens"]
        elif dice.random() < 0.5:
            body["usage"] = None
        else:
            del body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]

    return edited(protocol, generation, edit)


@fault("usage_wrong")
def _(protocol, generation, dice, now):
    def edit(body: dict) -> None:
        if protocol == "llamacpp":
            body["tokens_predicted"] += 3
        elif protocol == "sglang":
            body["meta_info"]["completion_tokens"] += 3
        else:
            body["usage"]["completion_tokens"] += 3

    return edited(protocol, generation, edit)


@fault("last_batch_lost", EXACT)
def _(protocol, generation, dice, now):
    if generation.finish != "stop":
        return None
    return good(protocol, replace(generation, ids=generation.ids[:-1]))


@fault("ids_absent", EXACT)
def _(protocol, generation, dice, now):
    def edit(body: dict) -> None:
        for holder in (body, *body.get("choices", [])):
            for name in ("tokens", "output_ids", "token_ids", "response_token_ids", "prompt_token_ids"):
                holder.pop(name, None)

    return edited(protocol, generation, edit)


@fault("ids_shapes", EXACT)
def _(protocol, generation, dice, now):
    return good(protocol, generation)


@fault("prompt_ids_differ", EXACT)
def _(protocol, generation, dice, now):
    return good(protocol, replace(generation, prompt_ids=[generation.prompt_ids[0], *generation.prompt_ids]))


@fault("replacement_char", CHAT)
def _(protocol, generation, dice, now):
    return edited(protocol, generation, lambda b: set_text(protocol, b, generation.text + " caf\ufffd"))


@fault("model_swap", ("llamacpp", *OPENAI))
def _(protocol, generation, dice, now):
    return good(protocol, replace(generation, model="another-model-8bit"))


@fault("200_overlong_1tok")
def _(protocol, generation, dice, now):
    return good(protocol, replace(generation, ids=generation.ids[1:2], text=generation.text[:3], finish="length"))


# --- errors -----------------------------------------------------------------------------------------


@fault("400_context")
def _(protocol, generation, dice, now):
    if protocol == "llamacpp":
        text = "the request exceeds the available context size, try increasing it"
        return error(protocol, 400, text, "exceed_context_size_error", n_prompt_tokens=4320, n_ctx=4096)
    if protocol == "openrouter":
        text = "This endpoint's maximum context length is 4096 tokens. However, you requested about 4320 tokens."
        return error(protocol, 400, text)
    text = (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of "
        "4320 tokens: 1320 tokens from the input messages and 3000 tokens for the completion."
    )
    return error(protocol, 400, text)


@fault("400_overlong_input")
def _(protocol, generation, dice, now):
    return error(protocol, 400, "The input (61709 tokens) is longer than the model's context length (40960 tokens).")


@fault("400_kimi_reasoning", CHAT)
def _(protocol, generation, dice, now):
    text = "thinking is enabled but reasoning_content is missing in assistant tool call message at index 3"
    return error(protocol, 400, text)


@fault("404_model")
def _(protocol, generation, dice, now):
    return error(protocol, 404, "The model `target` does not exist.", "NotFoundError")


@fault("408_429_529")
def _(protocol, generation, dice, now):
    status = dice.choice([408, 409, 425, 429, 529])
    wire = error(protocol, status, "try again later", "OverloadedError")
    if dice.random() < 0.5:
        wire.headers["Retry-After"] = "0"
    return wire


@fault("429_no_retry_after")
def _(protocol, generation, dice, now):
    reset = {"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(now * 1000) + 200)}
    return error(protocol, 429, "Rate limit exceeded: per-minute", "RateLimitError", metadata={"headers": reset})


@fault("429_soon")
def _(protocol, generation, dice, now):
    wire = error(protocol, 429, "Rate limit exceeded: per-second", "RateLimitError")
    wire.headers["Retry-After"] = "1"
    return wire


@fault("429_for_ages")
def _(protocol, generation, dice, now):
    wire = error(protocol, 429, "Rate limit exceeded: free-models-per-month", "RateLimitError")
    wire.headers["Retry-After"] = "99999999"
    return wire


@fault("429_upstream")
def _(protocol, generation, dice, now):
    metadata = {"raw": "the model is temporarily rate-limited upstream", "provider_name": "Beta"}
    return error(protocol, 429, "Provider returned error", "RateLimitError", metadata=metadata)


@fault("402_credits")
def _(protocol, generation, dice, now):
    return error(protocol, 402, "Insufficient credits")


@fault("500_logprob_nan")
def _(protocol, generation, dice, now):
    text = "Out of range float values are not JSON compliant"
    if dice.random() < 0.5:
        return Wire(text.encode(), 500, {"Content-Type": "text/plain"})
    return error(protocol, 500, text, "InternalServerError")


@fault("500_client_disc")
def _(protocol, generation, dice, now):
    return Wire(b"Internal Server Error", 500, {"Content-Type": "text/plain; charset=utf-8"})


@fault("500_surrogate")
def _(protocol, generation, dice, now):
    text = "TypeError: TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
    if protocol in OPENAI and dice.random() < 0.5:
        return Wire(orjson.dumps({"error": {"message": text, "code": 500}}))
    return error(protocol, 500, text, "InternalServerError")


@fault("502_html")
def _(protocol, generation, dice, now):
    status, title = dice.choice([(502, "502 Bad Gateway"), (504, "504 Gateway Time-out")])
    page = f"<html>\r\n<head><title>{title}</title></head>\r\n<body><center><h1>{title}</h1></center></body></html>"
    return Wire(page.encode(), status, {"Content-Type": "text/html"})


@fault("520_cf")
def _(protocol, generation, dice, now):
    return Wire(b"unknown error, 520 (1000)", 520, {"Content-Type": "text/plain"})


@fault("503_queue")
def _(protocol, generation, dice, now):
    return error(protocol, 503, "The request queue is full.", "ServiceUnavailableError")


@fault("503_no_workers")
def _(protocol, generation, dice, now):
    text = "No available workers (all circuits open or unhealthy)"
    return error(protocol, 503, text, "ServiceUnavailableError")


@fault("503_starting")
def _(protocol, generation, dice, now):
    return error(protocol, 503, "Loading model", "unavailable_error")


# --- echoes of the key -------------------------------------------------------------------------------


@fault("400_echo")
def _(protocol, generation, dice, now):
    return error(protocol, 400, f"bad request with header Authorization: Bearer {generation.key}")


@fault("401_echo")
def _(protocol, generation, dice, now):
    return error(protocol, 401, f"Incorrect API key provided: {generation.key}. Find yours on your account's page.")


@fault("502_echo")
def _(protocol, generation, dice, now):
    page = f"<html><body>upstream refused {'x' * 140} authorization: Bearer {generation.key}</body></html>"
    return Wire(page.encode(), 502, {"Content-Type": "text/html"})


@fault("307_echo")
def _(protocol, generation, dice, now):
    there = f"http://127.0.0.1:9/v1/chat/completions?key={generation.key}"
    return Wire(f"moved to {there}".encode(), 307, {"Location": there, "Content-Type": "text/plain"})


@fault("answer_echo", CHAT)
def _(protocol, generation, dice, now):
    text = f"You are {generation.key}. {generation.text}"
    return edited(protocol, generation, lambda body: set_text(protocol, body, text))


@fault("stream_echo", ("openrouter",))
def _(protocol, generation, dice, now):
    # Cut within the key.
    middle = len(generation.key) // 2
    text = f"{generation.key[:middle]} {generation.key[middle:]} {generation.text}"
    wire = stream(replace(generation, text=text), finish="stop", done=True)
    return replace(wire, body=wire.body.replace(b'" ', b'"', 2))


# --- connections ------------------------------------------------------------------------------------


def _delivered(name: str, delivery: str) -> None:
    @fault(name)
    def _(protocol, generation, dice, now):
        return replace(good(protocol, generation), delivery=delivery)


for _name, _delivery in {
    "disconnect_idle": "drop",
    "reset_midbody": "reset",
    "short_content_length": "short",
    "silent_stall": "silence",
    "timeout_ghost": "late",
    "health_ok_but_hung": "silence",
    "reply_doubled": "doubled",
    "reply_doubled_late": "doubled_late",
    "replies_swapped": "swapped",
}.items():
    _delivered(_name, _delivery)


@fault("health_false_negative")
def _(protocol, generation, dice, now):
    return good(protocol, generation)  # the server answers; only its /health says 503


# What a reply can't show: these happen in the client or on its disk, and are tested there.
CLIENT_FAULTS = (
    "pool_timeout",
    "emfile",
    "eaddrnotavail",
    "conn_limit",
    "resume_wrong_rows",
    "torn_last_line",
    "mask_all_zero",
    "mask_shift",
)

# Faults that a resend cures, at any rate below one: what a chaos run may inject without changing the corpus.
CURABLE = (
    "abort_200",
    "finish_null",
    "no_done",
    "error_in_200",
    "choices_null",
    "choices_empty",
    "content_null_stop",
    "leading_ws",
    "unasked_encoding",
    "broken_finish",
    "400_duplicate_id",
    "sse_comment",
    "sse_split_utf8",
    "usage_missing",
    "usage_wrong",
    "last_batch_lost",
    "408_429_529",
    "429_no_retry_after",
    "429_upstream",
    "500_client_disc",
    "502_html",
    "520_cf",
    "503_queue",
    "503_no_workers",
    "503_starting",
    "health_false_negative",
    "disconnect_idle",
    "reset_midbody",
    "short_content_length",
    "silent_stall",
    "timeout_ghost",
    "reply_doubled",
    "reply_doubled_late",
)
