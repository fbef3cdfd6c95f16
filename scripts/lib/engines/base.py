"""Types that every engine adapter shares.

An adapter is sans-IO: it turns a `Request` into the `Call` to send and a reply's bytes into an
`Answer` or a `Failure`, as pure functions, so that each shape that servers really send is one row
of a table-driven test. The transport moves the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from scripts.lib.config.model import Sampling
from scripts.lib.core.records import Message


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

    `output_ids`, whole numbers from 0, are None for text-only APIs; `matched_stop` is the id of the stop token that the engine
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
