"""Types that every engine adapter shares, and how any HTTP error is read.

An adapter is sans-IO: it turns a `Request` into the `Call` to send and a reply's bytes into an
`Answer` or a `Failure`, as pure functions, so that each shape that servers really send is one row
of a table-driven test. The transport moves the bytes.
"""

import email.utils
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from scripts.lib.config import Sampling
from scripts.lib.records import Message


@dataclass(slots=True)
class Request:
    """One generation to ask for."""

    id: str  # unique per send: the engine's request id, used to abort it
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    sampling: Sampling
    messages: list[Message] = field(default_factory=list)  # for APIs that take no ids
    tools: str | None = None
    stop_ids: Sequence[int] = ()  # ids that end the turn, for engines that go by the model's own list only


@dataclass(slots=True, frozen=True)
class Call:
    """One HTTP call, relative to the endpoint's base URL."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """What an engine generated. `finish_reason` is `stop`, `length`, `content_filter` or `tool_calls`.

    `output_ids` is None for text-only APIs; `matched_stop` is the id of the stop token that the engine
    reports, whether or not it is among the output ids.
    """

    finish_reason: str
    output_ids: list[int] | None = None
    matched_stop: int | None = None
    text: str | None = None
    reasoning: str | None = None
    prompt_tokens: int | None = None  # as the engine counted them
    output_tokens: int | None = None
    model: str = ""
    provider: str = ""
    cost_usd: float | None = None
    flags: list[str] = field(default_factory=list)


Kind = Literal["retry", "throttle", "wait", "free", "permanent", "fatal"]


@dataclass(slots=True)
class Failure:
    """Why there is no answer, and what to do about it.

    - `retry`: send again after a backoff; counts as an attempt of the prompt
    - `throttle`: the server is saturated: fewer in flight, again after a pause, not an attempt
    - `wait`: the endpoint is down, starting or wrong: take it out until a canary passes; not an attempt
    - `free`: a stale keep-alive connection: again at once
    - `permanent`: this prompt can't be answered; it ends in `outcome`
    - `fatal`: no prompt can be answered (no credit, wrong key, other prompt ids): stop, resumable
    """

    kind: Kind
    reason: str
    outcome: str = "rejected"  # of a permanent failure
    retry_after: float | None = None  # seconds
    billed: bool = False  # the request may have been generated, and paid, although no answer came
    most_attempts: int | None = None  # fewer than the configured ones: deterministic errors


@dataclass(slots=True, frozen=True)
class EngineMetrics:
    """What a server says about its load. None: this engine (or version) does not tell."""

    running: int | None = None  # requests being decoded
    queued: int | None = None  # requests that wait for a slot
    kv_usage: float | None = None  # share of the key-value cache in use, 0 to 1
    generated: int | None = None  # tokens generated since the server started


@dataclass(slots=True, frozen=True)
class EngineFacts:
    """What an endpoint says that it is. None: it does not tell."""

    engine: str
    version: str | None = None
    models: tuple[str, ...] = ()
    vocab_size: int | None = None
    context_length: int | None = None
    weights: str | None = None  # path or name of the weights behind the served name


@dataclass(slots=True, frozen=True)
class Reply:
    """Status, headers (names in lower case) and body of an answered call."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON, or None when the call failed or it is not JSON."""
        if self.status != 200:
            return None
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


class Adapter(Protocol):
    """One module of this package: `llamacpp`, `sglang`, `vllm` or `openai`."""

    exact: bool  # takes our prompt ids and answers with the ids that it sampled

    def request(self, request: Request) -> Call: ...
    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure: ...
    def abort(self, request_id: str) -> Call | None: ...
    def probe(self) -> list[Call]: ...
    def read_probe(self, replies: list[Reply | None]) -> EngineFacts: ...


JSON = {"Content-Type": "application/json"}


def post(path: str, body: dict, headers: Mapping[str, str] | None = None) -> Call:
    """A POST of a JSON body."""
    return Call("POST", path, orjson.dumps(body), {**JSON, **headers} if headers else JSON)


def read_object(reply: Reply) -> dict | Failure:
    """The JSON object of a 200 reply; a Failure when it is something else, or holds an error.

    Leading blanks (keep-alive padding of proxies) are legal JSON; HTML and half bodies are not.
    """
    try:
        value = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return Failure("retry", f"HTTP 200 but not JSON: {excerpt(reply.body)}", billed=True)
    if not isinstance(value, dict):
        return Failure("retry", f"HTTP 200 but no JSON object: {excerpt(reply.body)}", billed=True)
    return value


def excerpt(body: bytes | str, length: int = 200) -> str:
    """The first characters of a body on one line, for messages: nothing in it steers a terminal."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return text if len(text) <= length else text[: length - 1] + "…"


def error_details(body: bytes) -> tuple[str, int | None, dict]:
    """(message, code, metadata) of an error body in any of the shapes that servers use.

    SGLang is flat, `{"object": "error", "message", "code"}`; OpenAI, vLLM, llama.cpp and SGLang's
    `/generate` nest under `error`; OpenRouter adds `metadata`; proxies send HTML or plain text.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        return excerpt(body), None, {}
    error = value.get("error", value)
    if isinstance(error, str):
        return excerpt(error), None, {}
    if not isinstance(error, dict):
        return excerpt(body), None, {}
    code = error.get("code")
    metadata = error.get("metadata")
    message = str(error.get("message") or error.get("detail") or excerpt(body))
    if error.get("type") == "exceed_context_size_error" or code == "context_length_exceeded":
        message += " (context length)"
    number = code if isinstance(code, int) else int(code) if isinstance(code, str) and code.isdigit() else None
    return excerpt(message), number, metadata if isinstance(metadata, dict) else {}


_CONTEXT = re.compile(r"context.{0,12}(length|size|window)|longer than the model|maximum.{0,20}length", re.IGNORECASE)
_NON_FINITE = re.compile(r"out of range float|\bnan\b|non-?finite", re.IGNORECASE)
_STARTING = re.compile(r"starting|loading|not ready|no available workers|unhealthy|shutting down", re.IGNORECASE)
_NO_MODEL = re.compile(r"model", re.IGNORECASE)


def read_error(status: int, headers: Mapping[str, str], body: bytes, now: float) -> Failure:
    """What an HTTP error status means. `now` is the wall clock (seconds since 1970), for reset times.

    An error inside HTTP 200 is read with its own code as `status`.
    """
    message, _, metadata = error_details(body)
    raw = metadata.get("raw")
    detail = f"HTTP {status}: {message}" + (f" ({excerpt(str(raw))})" if raw else "")
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
    if status in (400, 413, 422) and _CONTEXT.search(message):
        return Failure("permanent", detail, outcome="prompt_too_long")
    if 300 <= status < 400:
        return Failure("wait", f"{detail}: the endpoint redirects: give its final URL")
    return Failure("permanent", detail, outcome="rejected")


def retry_after(headers: Mapping[str, str], metadata: Mapping[str, Any], now: float) -> float | None:
    """Seconds to wait, from Retry-After (seconds or date) or a reset time in header or body.

    OpenRouter puts `X-RateLimit-Reset`, milliseconds since 1970, into `error.metadata.headers`.
    """
    lowered = {key.lower(): value for key, value in headers.items()}
    inner = metadata.get("headers")
    if isinstance(inner, dict):
        lowered = {key.lower(): value for key, value in inner.items()} | lowered
    for name in ("retry-after-ms", "retry-after", "x-ratelimit-reset"):
        value = str(lowered.get(name, "")).strip()
        if not value:
            continue
        try:
            number = float(value)
        except ValueError:
            try:
                return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
            except ValueError:
                continue
        if name == "retry-after-ms":
            return max(0.0, number / 1000)
        if name == "retry-after":
            return max(0.0, number)
        # A reset is an instant (ms or s since 1970) or, when small, a number of seconds.
        if number > 1e12:
            number /= 1000
        return max(0.0, number - now) if number > 1e9 else max(0.0, number)
    return None


def error_in_200(body: dict, reply: Reply, now: float) -> Failure | None:
    """The failure that a reply with status 200 holds instead of an answer, read with its own code.

    OpenRouter and gateways answer 200 before they know (litellm issue 8448); the error stands at the
    top or in the first choice.
    """
    error = body.get("error")
    if error is None:
        choices = body.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            error = choices[0].get("error")
    if not error:
        return None
    text = orjson.dumps({"error": error})
    _, code, _ = error_details(text)
    status = code if code is not None and 400 <= code < 600 else 502
    return read_error(status, reply.headers, text, now)


def check_ids(request: Request, answer: Answer, echoed: Any = None) -> Answer | Failure:
    """Compare what the engine says of the ids with what was sent and came.

    Other prompt ids than ours mean another template or a second BOS: the whole run is wrong, not the
    sample (sglang PR 26555, vllm PR 55288). Where the ids are at hand, a wrong count of them is only a flag.
    """
    sent = request.prompt_ids
    if isinstance(echoed, list) and echoed != sent:
        at = next((i for i, (a, b) in enumerate(zip(echoed, sent)) if a != b), min(len(echoed), len(sent)))
        return Failure(
            "fatal",
            f"the engine used other prompt ids: from position {at} {echoed[at : at + 5]}, sent were {sent[at : at + 5]} "
            f"({len(echoed)} and {len(sent)} ids): its template or tokenizer is not the target's",
        )
    got = len(answer.output_ids or ())
    counts = answer.prompt_tokens in (None, len(sent)), answer.output_tokens in (None, got)
    if not counts[0] and echoed is None:
        return Failure("fatal", f"the engine counted {answer.prompt_tokens} prompt tokens, {len(sent)} were sent")
    if not all(counts):
        answer.flags.append("usage_mismatch")
    if answer.finish_reason == "length" and got < request.max_tokens:
        answer.flags.append("short_of_max_tokens")  # the engine has less room than we think (sglang PR 2956)
    return answer


def as_count(value: Any) -> int | None:
    """A token count, or None where a server leaves it out or sends nonsense."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
