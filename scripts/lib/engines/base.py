"""Types that every engine adapter shares.

An adapter is sans-IO: it turns a `Request` into the `Call` to send and a reply's bytes into an
`Answer` or a `Failure`, as pure functions, so that each shape that servers really send is one row
of a table-driven test. The transport moves the bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from scripts.lib.config.model import Config, Sampling
from scripts.lib.core.errors import UserError
from scripts.lib.core.secrets import redacted, redacted_bytes
from scripts.lib.engines.encodings import plain_body, unknown_encoding
from scripts.lib.engines.launching import ServerPlan
from scripts.lib.engines.metrics import MetricNames

if TYPE_CHECKING:  # the workflow plans without tables
    from scripts.lib.core.records import Message


@dataclass(slots=True)
class Request:
    """One generation to ask for."""

    id: str  # unique per send: the engine's request id, used to abort it
    prompt_ids: list[int]
    max_tokens: int
    seed: int | None  # None: the engine draws its own
    sampling: Sampling
    messages: "list[Message]" = field(default_factory=list)  # for APIs that take no ids
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
    reasoning_tokens: int | None = None  # of the thought, shown or not, as the API counted them
    prompt_tokens: int | None = None  # as the engine counted them
    output_tokens: int | None = None
    model: str = ""
    provider: str = ""
    reply_id: str = ""  # the API's own name of its reply, where nothing else tells whose it is
    cost_usd: float | None = None
    billed_elsewhere: bool = False  # somebody bills more than `cost_usd`, who doesn't tell
    flags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Once more than in the reply: a stream's pieces are put together here.
        self.text = self.text and redacted(self.text)
        self.reasoning = self.reasoning and redacted(self.reasoning)


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
    odd: bool = False  # as broken engines answer: many of them call for a canary

    def __post_init__(self) -> None:
        self.reason = redacted(self.reason)


@dataclass(slots=True, frozen=True)
class EngineFacts:
    """What an endpoint says that it is. None: it does not tell."""

    engine: str
    version: str | None = None
    models: tuple[str, ...] = ()
    vocab_size: int | None = None
    context_length: int | None = None
    room: int | None = None  # most tokens of a prompt and its answer together, where that is less than the context
    warning: str | None = None  # what people should know of it
    weights: str | None = None  # path or name of the weights behind the served name


@dataclass(slots=True, frozen=True)
class Reply:
    """Status, headers (names in lower case) and body, in plain UTF-8, of an answered call."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __post_init__(self) -> None:
        if self.body[:1] not in _JSON_BEGINS:
            object.__setattr__(self, "body", plain_body(self.headers, self.body))
            if "content-encoding" in self.headers and unknown_encoding(self.headers) is None:
                left = {name: value for name, value in self.headers.items() if name != "content-encoding"}
                object.__setattr__(self, "headers", left)
        # The one way in for what servers say: a key that one echoes gets no further.
        if (body := redacted_bytes(self.body)) is not self.body:
            object.__setattr__(self, "body", body)

    def json(self) -> Any:
        """The body as JSON, or None when the call failed or it is not JSON."""
        if self.status != 200:
            return None
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


class Adapter(ABC):
    """All that the project knows of one kind of engine. A class that says it, and its line in `ENGINES`, add a kind."""

    kind: ClassVar[str]  # its name in the configuration
    exact: ClassVar[bool]  # takes our prompt ids and answers with the ids that it sampled
    hosted: ClassVar[bool]  # somebody else's: reached through a proxy, routed, paid by the token; never started here
    names_its_model: ClassVar[bool]  # its list of models tells whether it serves ours
    returns_hidden_states: ClassVar[bool]
    only_gguf: ClassVar[bool]  # reads .gguf files and nothing else
    compiles: ClassVar[bool]  # its servers compile kernels at their first start, into caches that they share
    environment: ClassVar[str | None]  # the lock in envs/ that its servers are installed from; None: the client's own
    metrics: ClassVar[MetricNames | None]  # None: it publishes no load

    def __init__(self, config: Config) -> None:
        self.config, self.served_model = config, config.served_name

    def check(self) -> None:
        """Raise UserError when the configuration asks for what this engine can't do."""
        if self.hosted and not self.config.engine.endpoints:
            raise UserError(f"engine.endpoints: kind `{self.kind}` needs the API's base URL: it is not started here")
        if not self.hosted and self.config.engine.extra_body:
            raise UserError(f"engine.extra_body: kind `{self.kind}` is asked by ids: it is for hosted APIs")

    # --- requests and replies ---

    @abstractmethod
    def request(self, request: Request) -> Call:
        """The call that asks for a generation."""

    @abstractmethod
    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        """What a reply means. `now` is the wall clock (seconds since 1970)."""

    def abort(self, request_id: str) -> Call | None:
        """The call that ends a request whose client has gone; None where the server notices by itself."""
        return None

    @abstractmethod
    def probe(self) -> list[Call]:
        """The calls that tell what serves there."""

    @abstractmethod
    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        """What their replies say, one for each call; None where one failed."""

    @property
    def listed_model(self) -> str:
        """The served model as the engine's own list names it."""
        return self.served_model

    # --- servers of our own ---

    def one_token(self) -> Call:
        """A request for one token of any prompt, by ids as in the run itself: whether a server works."""
        raise NotImplementedError(f"{self.kind} is never started here")

    def server_plan(self, target_dir: Path) -> ServerPlan:
        """How one server is started. Raises UserError when the configuration can't be launched."""
        raise NotImplementedError(f"{self.kind} is never started here")


_JSON_BEGINS = (b"{", b"[", b"")
JSON = {"Content-Type": "application/json"}


def post(path: str, body: dict, headers: Mapping[str, str] | None = None) -> Call:
    """A POST of a JSON body."""
    return Call("POST", path, orjson.dumps(body), {**JSON, **headers} if headers else JSON)


def sampling_fields(request: Request) -> dict[str, Any]:
    """How to sample, under the names that SGLang and vLLM share; all of it, so that no default of a model counts."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(request.stop_ids),
    }


def seed_field(name: str, request: Request) -> dict[str, int]:
    """The seed under the name that an engine has for it; nothing where none is to be sent."""
    return {} if request.seed is None else {name: request.seed}
