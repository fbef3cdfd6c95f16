"""One pass: every row that lacks a capture is sent through servers that return it."""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.client.attempts import Attempts, GivenUp
from scripts.lib.client.backlog import Backlog
from scripts.lib.client.canary import Canary
from scripts.lib.client.pool import Pool, Server
from scripts.lib.client.sending import Sender
from scripts.lib.client.supervision import Supervisor
from scripts.lib.client.transport import Transport, authorization, require_descriptors
from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.core.units import duration
from scripts.lib.engines.base import Failure, Reply, Request
from scripts.lib.engines.launching import environment_program
from scripts.lib.engines.sglang import SGLang, installed_help
from scripts.lib.fleet.lease import Lease, lease
from scripts.lib.hidden_states.plan import Capture, capturing
from scripts.lib.hidden_states.store import Row, Store, Stored
from scripts.lib.hidden_states.wire import INFO, read_states, server_problem, states_call, states_request
from scripts.lib.target.model import Target

LANE = "hidden_states"
_LINE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Piece:
    """A row on its way."""

    row: Row
    sends: int = 0
    attempts: Attempts = field(default_factory=Attempts)


def prepare(config: Config, capture: Capture) -> Config:
    """The configuration of the capture's servers. Raises UserError in one line when there can be none.

    Endpoints that run already keep only those that were started for this capture.
    """
    if not config.engine.endpoints:
        python = environment_program(config.engine.launch.environment, "python", SGLang.kind)
        text = installed_help(python)
        missing = [
            f"--{name}" for name, value in capture.flags.items() if value is not None and f"--{name}" not in text
        ]
        if missing:
            raise UserError(f"{python}: the installed SGLang does not know {', '.join(missing)}: 0.5.23 does")
        return capturing(config, capture)
    problems = asyncio.run(_problems(config, capture))
    fit = [url for url, problem in problems.items() if problem is None]
    if not fit:
        raise UserError("; ".join(f"{url}: {problem}" for url, problem in problems.items()))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"endpoints": fit})})


async def _problems(config: Config, capture: Capture) -> dict[str, str | None]:
    async with Transport(authorization(config.engine)) as transport:
        found: dict[str, str | None] = {}
        for url in config.engine.endpoints:
            reply = await transport.call_within(30.0, url.rstrip("/"), INFO)
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
    jitter: random.Random = field(default_factory=random.Random)

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
        native = self.config.engine.model_copy(update={"api": "native"})
        self.adapter = SGLang(self.config.model_copy(update={"engine": native}))
        self.begun = time.monotonic()
        self.pool = Pool(ceiling, time.monotonic, settings.ramp_per_second, settings.idle_seconds)
        self.backlog: Backlog[Piece] = Backlog(self._pieces(self.missing), time.monotonic, 2 * ceiling)
        states = Transport(authorization(self.config.engine), largest_reply=sys.maxsize)  # as large as a sample is long
        async with states as self.transport, asyncio.TaskGroup() as group:
            canary = Canary(self.config, self.target, self.adapter, self.transport, self.state)
            self.supervisor = Supervisor(
                self.config,
                ceiling,
                held,
                self.pool,
                canary,
                self.transport,
                self,
                self.say,
            )
            self.sender = Sender(settings, self.adapter, self.pool, self.transport, time.monotonic, self.say)
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
        row, tokens = piece.row, len(piece.row.input_ids)
        piece.sends += 1
        # The form of all our ids: the adapter knows a reply to another one of them.
        name = f"{digest(row.id)}-{len(self.capture.sglang_layers)}-{piece.sends}"
        request = states_request(name, row.input_ids)
        server = await self.pool.acquire(float(tokens), piece.attempts.avoid)
        begun = time.monotonic()
        reply = await self.sender.send(server, states_call(request), tokens, float(tokens))
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
        if tainted:
            self.store.forget(row.id, self.capture.tensor)
            return 0.0
        if isinstance(result, Failure):
            return await self._failed(piece, server, request.id, result)
        if result is not None:
            self.stored[row.id] = result
        self.done[row.id] = tokens
        self.pool.succeeded(server, tokens, time.monotonic() - begun)
        return None

    def _keep(self, row: Row, request: Request, reply: Reply) -> Stored | Failure | None:
        states = read_states(self.adapter, request, self.capture.width, row.id, reply, time.time())
        if isinstance(states, Failure):
            return states
        facts = self.supervisor.facts
        engine = f"{SGLang.kind} {facts.version}" if facts and facts.version else SGLang.kind
        return self.store.write(row, {**self.store.part(row), self.capture.tensor: states}, engine)

    async def _failed(self, piece: Piece, server: Server, request_id: str, failure: Failure) -> float | None:
        """Seconds until the next try; None when the row is given up."""
        failure = await self.sender.blame(server, request_id, piece.attempts, failure)
        next_try = piece.attempts.failed(failure, self.pool.successes, self.config.transport, self.jitter)
        if not isinstance(next_try, GivenUp):
            return next_try
        self.failed[piece.row.id] = next_try.reason
        self.say(f"warning: no hidden states of sample {piece.row.id}: {next_try.reason}")
        return None

    # --- what canaries vouch for ---

    @property
    def position(self) -> int:
        return self.replies

    def prove(self, server: Server) -> None:
        """Nothing to note: a later job asks for whole files only."""

    def distrust(self, server: Server, *, refusals: bool = False) -> None:
        """Ask again what an endpoint returned, or only what it refused, since its last good canary."""
        if not server.unproven:
            return
        doubtful = {id for id, (url, at) in self.arrived.items() if url == server.url and at >= server.trusted}
        ids = doubtful & (self.failed.keys() if refusals else self.done.keys() | self.failed.keys())
        server.unproven = max(0, server.unproven - len(ids)) if refusals else 0
        if not refusals:
            self.tainted |= doubtful & self.reading
        for id in ids:
            self.store.forget(id, self.capture.tensor)
            self.done.pop(id, None)
            self.failed.pop(id, None)  # refused by it, or given up on its last failure
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
