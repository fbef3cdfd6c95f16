"""What an HTTP error means, in any of the shapes that servers, gateways and hosted APIs send it."""

import email.utils
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from scripts.lib.engines.base import Failure, Kind, Reply
from scripts.lib.engines.values import as_object, as_objects, excerpt, read_object, shown


def error_details(body: bytes) -> tuple[str, int | None, dict]:
    """(message, code, metadata) of an error body in any of the shapes that servers use.

    SGLang is flat, `{"object": "error", "message", "code"}`; OpenAI, vLLM, llama.cpp and SGLang's
    `/generate` nest under `error`; OpenRouter adds `metadata`; proxies send HTML or plain text.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    return _details(value.get("error", value), excerpt(body)) if isinstance(value, dict) else (excerpt(body), None, {})


def _details(error: Any, whole: str) -> tuple[str, int | None, dict]:
    """(message, code, metadata) of an error; `whole` is what stands for its message where it has none."""
    if isinstance(error, str):
        return excerpt(error), None, {}
    if not isinstance(error, dict):
        return whole, None, {}
    code = error.get("code")
    message = error.get("message") or error.get("detail")
    text = shown(message) if message else whole
    if error.get("type") == "exceed_context_size_error" or code == "context_length_exceeded":
        text += " (context length)"
    if isinstance(code, str):
        code = int(code) if re.fullmatch("[0-9]{3}", code) else None
    return text, code if isinstance(code, int) else None, as_object(error.get("metadata"))


_LONGEST_PAUSE = 1e9  # seconds
_CONTEXT = re.compile(r"context.{0,12}(length|size|window)|longer than the model|maximum.{0,20}length", re.IGNORECASE)
_NON_FINITE = re.compile(r"out of range float|\bnan\b|non-?finite", re.IGNORECASE)
_STARTING = re.compile(r"starting|loading|not ready|no available workers|unhealthy|shutting down", re.IGNORECASE)
# A job that is started again asks under an id that the engine has not given up yet (sglang, tokenizer_manager.py).
_DUPLICATE = re.compile(r"duplicate.{0,12}request|request.{0,12}(duplicate|already (exists|in use))", re.IGNORECASE)
_NO_MODEL = re.compile(r"model", re.IGNORECASE)


def read_error(status: int, headers: Mapping[str, str], body: bytes, now: float) -> Failure:
    """What an HTTP error status means. `now` is the wall clock (seconds since 1970), for reset times.

    An error inside HTTP 200 is read with its own code as `status`.
    """
    message, _, metadata = error_details(body)
    return _meaning(status, headers, message, metadata, now)


def _meaning(status: int, headers: Mapping[str, str], message: str, metadata: dict, now: float) -> Failure:
    raw = metadata.get("raw")
    detail = f"HTTP {status}: {message}" + (f" ({shown(raw)})" if raw else "")
    pause = retry_after(headers, metadata, now)
    if status == 402:
        # OpenRouter: too much in flight for the balance is a pause, an empty balance is the end.
        if metadata.get("limit_source") == "openrouter_in_flight_budget":
            return Failure("throttle", detail, retry_after=pause)
        return Failure("fatal", f"{detail}: add credit and run again, nothing is lost")
    if status == 401:
        return Failure("fatal", f"{detail}: check the API key")
    if status == 403:
        if metadata.get("reasons") or "moderation" in message.lower():
            return Failure("permanent", detail, outcome="content_filter")
        return Failure("fatal", f"{detail}: the API key may not do this")
    if status == 404 and (_NO_MODEL.search(message) or not message):
        return Failure("wait", f"{detail}: the endpoint does not serve the model")
    if status in (404, 405):
        return Failure("wait", f"{detail}: the endpoint does not know this path: check engine.kind and the base URL")
    if status == 429:
        return Failure("throttle", detail, retry_after=pause)
    if status == 503:
        kind: Kind = "wait" if _STARTING.search(message) else "throttle"
        return Failure(kind, detail, retry_after=pause)
    if status in (408, 409, 425) or status >= 500:
        if status == 500 and _NON_FINITE.search(message):
            return Failure("retry", detail, outcome="rejected", most_attempts=2)
        if status == 529:
            return Failure("throttle", detail, retry_after=pause)
        return Failure("retry", detail, retry_after=pause, billed=status in (504, 524))
    if status == 400 and _DUPLICATE.search(message):
        return Failure("retry", detail)
    if status in (400, 413, 422) and _CONTEXT.search(message):
        return Failure("permanent", detail, outcome="prompt_too_long")
    if 300 <= status < 400:
        return Failure("wait", f"{detail}: the endpoint redirects: give its final URL")
    if status in (400, 413, 422):
        return Failure("permanent", detail, outcome="rejected")
    # 406 or 418 of a firewall is about the prompt, 410 about the endpoint: others tell.
    return Failure("retry", detail, outcome="rejected", most_attempts=2)


def retry_after(headers: Mapping[str, str], metadata: Mapping[str, Any], now: float) -> float | None:
    """Seconds to wait, from Retry-After (seconds or date) or a reset time in header or body.

    OpenRouter puts `X-RateLimit-Reset`, milliseconds since 1970, into `error.metadata.headers`.
    """
    lowered = {key.lower(): value for key, value in headers.items()}
    lowered = {key.lower(): value for key, value in as_object(metadata.get("headers")).items()} | lowered
    for name in ("retry-after-ms", "retry-after", "x-ratelimit-reset"):
        seconds = _seconds(name, shown(lowered.get(name, "")), now)
        if seconds is not None:
            return min(max(0.0, seconds), _LONGEST_PAUSE)
    return None


def _seconds(name: str, value: str, now: float) -> float | None:
    """What a header says, in seconds from now; None when it says nothing."""
    try:
        number = float(value)
    except ValueError:
        try:
            return email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    if not math.isfinite(number):
        return None
    if name == "retry-after-ms":
        return number / 1000
    if name == "retry-after":
        return number
    # A reset is an instant (ms or s since 1970) or, when small, a number of seconds.
    if number > 1e12:
        number /= 1000
    return number - now if number > 1e9 else number


def read_body(reply: Reply, now: float) -> dict | Failure:
    """The JSON object of a reply that holds an answer, or the failure that it holds instead."""
    if reply.status != 200:
        return read_error(reply.status, reply.headers, reply.body, now)
    body = read_object(reply)
    return body if isinstance(body, Failure) else error_in_200(body, reply, now) or body


def error_in_200(body: dict, reply: Reply, now: float) -> Failure | None:
    """The failure that a reply with status 200 holds instead of an answer, read with its own code.

    OpenRouter and gateways answer 200 before they know (litellm issue 8448); the error stands at the
    top or in the first choice.
    """
    error = body.get("error")
    if error is None:
        error = next((choice.get("error") for choice in as_objects(body.get("choices"))), None)
    if not error:
        return None
    message, code, metadata = _details(error, shown(error))
    status = code if code is not None and 400 <= code < 600 else 502
    return _meaning(status, reply.headers, message, metadata, now)
