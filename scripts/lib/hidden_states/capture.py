"""One pass: every row that lacks a capture is sent through servers that return it."""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.backlog import Backlog
from scripts.lib.canary import Canary
from scripts.lib.config import Config
from scripts.lib.dialogue import backoff
from scripts.lib.engines.base import Failure, Reply, Request
from scripts.lib.engines.sglang import SGLang
from scripts.lib.errors import UserError
from scripts.lib.fleet.launch import environment_program, served_name
from scripts.lib.fleet.launch.sglang import installed_help
from scripts.lib.fleet.lease import Lease, lease
from scripts.lib.hidden_states.plan import Capture, with_flags
from scripts.lib.hidden_states.store import Row, Store, Stored
from scripts.lib.hidden_states.wire import INFO, read_states, server_problem, states_call, states_request
from scripts.lib.pool import Pool, Server
from scripts.lib.progress import duration
from scripts.lib.provenance import digest
from scripts.lib.supervision import Supervisor
from scripts.lib.target import Target
from scripts.lib.transport import Transport, authorization, require_descriptors

LANE = "hidden_states"
_LINE_SECONDS = 10.0
_WARN_SECONDS = 10.0
_FREE = 3  # stale connections in a row that cost nothing


@dataclass(slots=True, eq=False)
class Piece:
    """A row on its way."""

    row: Row
    sends: int = 0
    attempts: int = 0  # failures that count
    deterministic: int = 0  # of these, those that are likely to come again
    pauses: int = 0
    successes_seen: int = -1  # the pool's successes at the last failure
    avoid: str | None = None  # endpoint that failed last


def prepare(config: Config, capture: Capture) -> Config:
    """The configuration of the capture's servers. Raises UserError in one line when there can be none.

    Endpoints that run already keep only those that were started for this capture.
    """
    if not config.engine.endpoints:
        python = environment_program(config.engine.launch.environment, "python", "sglang")
        text = installed_help(python)
        missing = [
            f"--{name}" for name, value in capture.flags.items() if value is not None and f"--{name}" not in text
        ]
        if missing:
            raise UserError(f"{python}: the installed SGLang does not know {', '.join(missing)}: 0.5.23 does")
        return with_flags(config, capture)
    problems = asyncio.run(_problems(config, capture))
    fit = [url for url, problem in problems.items() if problem is None]
    if not fit:
        raise UserError("; ".join(f"{url}: {problem}" for url, problem in problems.items()))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"endpoints": fit})})


async def _problems(config: Config, capture: Capture) -> dict[str, str | None]:
    async with Transport(authorization(config.engine)) as transport:
        found: dict[str, str | None] = {}
        for url in config.engine.endpoints:
            reply = await transport.call(url.rstrip("/"), INFO, seconds=30.0)
            if isinstance(reply, Failure):
                found[url] = reply.reason
            else:
                found[url] = server_problem(reply.json(), capture)
        return found


@dataclass(eq=False)
class Pass:
    """A capture of all rows that lack it. `config` is that of `prepare`."""

    config: Config
    target_dir: Path
    target: Target
    state: Path
    capture: Capture
    store: Store
    rows: Callable[[Container[str]], Iterator[Row]]
    missing: dict[str, int]  # tokens by sample id
    say: Callable[[str], None]
    stored: dict[str, Stored] = field(default_factory=dict)  # files that this pass has finished
    failed: dict[str, str] = field(default_factory=dict)  # why, by sample id
    done: dict[str, int] = field(default_factory=dict)  # tokens by sample id
    replies: int = 0
    arrived: dict[str, tuple[str, int]] = field(default_factory=dict)  # endpoint and number of each sample's last reply
    reading: set[str] = field(default_factory=set)  # samples whose reply is being read
    tainted: set[str] = field(default_factory=set)  # of these, those whose server turned out to be broken

    def run(self) -> None:
        """Ask until every row is captured or has failed for good. Raises UserError when there is no hope for more."""
        with lease(self.config, self.target_dir, self.state, LANE) as held:
            try:
                asyncio.run(self._run(held))
            except BaseExceptionGroup as group:
                raise _first(group) from None

    async def _run(self, held: Lease) -> None:
        settings, ceiling = self.config.transport, self.config.hidden_states.concurrency
        require_descriptors(ceiling)
        self.adapter = SGLang(self.config.engine.model_copy(update={"api": "native"}), served_name(self.config))
        self.begun = time.monotonic()
        self._warned = float("-inf")
        self.pool = Pool(ceiling, time.monotonic, settings.ramp_per_second, settings.idle_seconds)
        self.backlog: Backlog[Piece] = Backlog(self._pieces(self.missing), time.monotonic, 2 * ceiling)
        states = Transport(authorization(self.config.engine), largest_reply=sys.maxsize)  # as large as a sample is long
        async with states as self.transport, asyncio.TaskGroup() as group:
            canary = Canary(self.config, self.target, self.adapter, self.transport)
            self.supervisor = Supervisor(
                self.config,
                ceiling,
                held,
                self.pool,
                canary,
                self.transport,
                lambda: self.replies,
                lambda server: None,  # a later job asks for whole files only
                self._distrust,
                self.say,
            )
            helpers = [group.create_task(self.supervisor.run()), group.create_task(self._keep_reporting())]
            while self.backlog.open:
                await asyncio.wait([group.create_task(self._worker()) for _ in range(ceiling)])
                await self.supervisor.close()  # a bad canary puts rows back into the backlog
            for helper in helpers:
                helper.cancel()

    def _pieces(self, wanted: Container[str]) -> Iterator[Piece]:
        return map(Piece, self.rows(wanted))

    async def _worker(self) -> None:
        while (piece := await self.backlog.get()) is not None:
            delay = await self._ask(piece)
            if delay is None:
                self.backlog.finished()
            else:
                self.backlog.again(piece, delay)

    async def _ask(self, piece: Piece) -> float | None:
        """One request. None: the row has its end; else the seconds until it is to be asked again."""
        row, settings = piece.row, self.config.transport
        piece.sends += 1
        # The form of all our ids: the adapter knows a reply to another one of them.
        name = f"{digest(row.id)}-{len(self.capture.sglang_layers)}-{piece.sends}"
        request = states_request(name, row.input_ids)
        server = await self.pool.acquire(float(len(row.input_ids)), piece.avoid)
        begun = time.monotonic()
        deadline = asyncio.timeout(settings.base_seconds + len(row.input_ids) / settings.min_tokens_per_second)
        server.deadlines.add(deadline)
        try:
            reply = await self.transport.call(server.url, states_call(request), deadline)
        finally:
            server.deadlines.discard(deadline)
            self.pool.release(server, float(len(row.input_ids)))
        if isinstance(reply, Failure):
            return await self._failed(piece, server, request.id, reply)
        # Noted now: a canary may fail while the reply is still being read.
        self.arrived[row.id] = server.url, self.replies
        self.replies += 1
        self.reading.add(row.id)
        server.unproven += 1
        # Parsing, hashing and fsync leave the interpreter free for other replies.
        result = await asyncio.to_thread(self._keep, row, request, reply)
        self.reading.discard(row.id)
        tainted = row.id in self.tainted
        self.tainted.discard(row.id)
        if isinstance(result, Failure):
            return await self._failed(piece, server, request.id, result)
        if tainted:
            self.store.forget(row.id, self.capture.tensor)
            return 0.0
        if result is not None:
            self.stored[row.id] = result
        self.done[row.id] = len(row.input_ids)
        self.pool.succeeded(server, len(row.input_ids), time.monotonic() - begun)
        return None

    def _keep(self, row: Row, request: Request, reply: Reply) -> Stored | Failure | None:
        states = read_states(self.adapter, request, self.capture.width, row.id, reply, time.time())
        if isinstance(states, Failure):
            return states
        facts = self.supervisor.facts
        engine = f"sglang {facts.version}" if facts and facts.version else "sglang"
        return self.store.write(row, {**self.store.part(row), self.capture.tensor: states}, engine)

    async def _failed(self, piece: Piece, server: Server, request_id: str, failure: Failure) -> float | None:
        """Blame the row, the server or nobody, as stage 2 does."""
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if failure.kind == "permanent":
            return self._give_up(piece, failure.reason)
        piece.avoid = server.url
        if failure.billed:
            await self.transport.abort(server.url, self.adapter.abort(request_id))
        now = time.monotonic()
        if failure.kind != "free" and now - self._warned >= _WARN_SECONDS:
            self._warned = now
            self.say(f"{failure.kind}: {server.url}: {failure.reason}")
        if failure.kind == "free" and piece.pauses < _FREE:
            piece.pauses += 1
            return 0.0
        counts = failure.kind in ("retry", "free") and server.status == "ready"
        if failure.kind == "throttle":
            self.pool.throttled(server, failure.retry_after)
        elif failure.kind == "wait" or server.status == "ready":
            seen = piece.successes_seen == self.pool.successes
            self.pool.failed(server, failure.reason, suspect=failure.kind == "wait" or seen)
        # A failure says something about the row only when others were answered since its last one.
        if counts and piece.successes_seen != self.pool.successes:
            piece.successes_seen = self.pool.successes
            piece.attempts += 1
            piece.deterministic += failure.most_attempts is not None
            most = failure.most_attempts or self.config.transport.attempts
            if piece.attempts >= self.config.transport.attempts or piece.deterministic >= most:
                return self._give_up(piece, f"{piece.attempts} attempts, the last: {failure.reason}")
        settings = self.config.transport
        delay = backoff(piece.pauses, settings.backoff_first, settings.backoff_cap, random.Random())
        piece.pauses += 1
        return max(delay, failure.retry_after or 0.0)

    def _give_up(self, piece: Piece, reason: str) -> None:
        self.failed[piece.row.id] = reason
        self.say(f"warning: no hidden states of sample {piece.row.id}: {reason}")

    def _distrust(self, server: Server) -> None:
        """Ask again what an endpoint returned since its last good canary."""
        if not server.unproven:
            return
        server.unproven = 0
        doubtful = {id for id, (url, at) in self.arrived.items() if url == server.url and at >= server.trusted}
        ids = doubtful & self.done.keys()
        self.tainted |= doubtful & self.reading
        for id in ids:
            self.store.forget(id, self.capture.tensor)
            self.done.pop(id)
            self.stored.pop(id, None)
        if ids:
            self.backlog.add(self._pieces(ids))

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            if self.pool.ready():
                self.say(self.line(time.monotonic() - self.begun))

    def line(self, seconds: float) -> str:
        """Progress, `seconds` after the beginning."""
        tokens, left = sum(self.done.values()), sum(self.missing.values())
        left -= tokens + sum(self.missing[id] for id in self.failed)
        rate = tokens / max(seconds, 1e-9)
        return (
            f"{self.capture.name} {len(self.done)}/{len(self.missing)} failed {len(self.failed)} · {rate:.0f} tok/s · "
            f"{self.pool.in_flight} in flight · eta {duration(left / rate / 3600 if rate else None)}"
        )


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error that a group of tasks died of."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
