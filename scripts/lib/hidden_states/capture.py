"""One pass: every row that lacks a capture is sent through servers that return it."""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.lib.client.attempts import Attempts, GivenUp
from scripts.lib.client.backlog import Backlog
from scripts.lib.client.blame import Blame
from scripts.lib.client.canary import Canary
from scripts.lib.client.pool import Pool, PooledEndpoint
from scripts.lib.client.sending import Sender
from scripts.lib.client.supervision import Supervisor
from scripts.lib.client.transport import HttpTransport, authorization, require_descriptors
from scripts.lib.client.vouching import Voided, Vouching
from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.core.units import duration
from scripts.lib.engines.base import Failure, Reply, Request
from scripts.lib.engines.launching import environment_program
from scripts.lib.engines.request_ids import RequestIds
from scripts.lib.engines.sglang import SGLang, installed_help
from scripts.lib.fleet.lease import Lease, lease
from scripts.lib.hidden_states.plan import Capture, capturing
from scripts.lib.hidden_states.store import CorpusRow, StateFiles, Stored
from scripts.lib.hidden_states.wire import INFO, read_states, server_problem, states_call, states_request
from scripts.lib.target.model import Target

LANE = "hidden_states"
_LINE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Piece:
    """A row on its way."""

    row: CorpusRow
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
    async with HttpTransport(authorization(config.engine)) as transport:
        found: dict[str, str | None] = {}
        for url in config.engine.endpoints:
            reply = await transport.call_within(30.0, url.rstrip("/"), INFO)
            if isinstance(reply, Failure):
                found[url] = reply.reason
            else:
                found[url] = server_problem(reply.json(), capture)
        return found


class Captured:
    """What one pass has got of each row, by sample id."""

    def __init__(self, store: StateFiles, tensor: str) -> None:
        self._store, self._tensor = store, tensor
        self.stored: dict[str, Stored] = {}  # files that this pass has finished
        self.done: dict[str, int] = {}  # tokens
        self.failed: dict[str, str] = {}  # why
        self.reading: set[str] = set()  # their reply is being read
        self.position = 0  # replies so far
        self._arrived: dict[str, tuple[str, int]] = {}  # endpoint and position of the last reply

    def arrived(self, name: str, url: str) -> None:
        """A reply is about to be read: a canary may fail meanwhile."""
        self._arrived[name] = url, self.position
        self.position += 1
        self.reading.add(name)

    def prove(self, url: str, before: int) -> None:
        """Nothing to note: a later job asks for whole files only."""

    def void(self, url: str, since: int) -> Voided:
        doubtful = self._since(url, since)
        return Voided(self._discard(doubtful & (self.done.keys() | self.failed.keys())), doubtful & self.reading)

    def void_refusals(self, url: str, since: int) -> Voided:
        return Voided(self._discard(self._since(url, since) & self.failed.keys()), set())

    def _since(self, url: str, since: int) -> set[str]:
        return {name for name, (whose, at) in self._arrived.items() if whose == url and at >= since}

    def _discard(self, names: set[str]) -> set[str]:
        for name in names:
            self._store.forget(name, self._tensor)
            for kept in (self.done, self.failed, self.stored):
                kept.pop(name, None)
        return names


@dataclass(eq=False)
class Pass:
    """A capture of all rows that lack it. `config` is that of `prepare`."""

    config: Config
    target_dir: Path
    target: Target
    state: Path
    capture: Capture
    store: StateFiles
    rows: Callable[[Container[str]], Iterator[CorpusRow]]
    missing: dict[str, int]  # tokens by sample id
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.got = Captured(self.store, self.capture.tensor)
        self.request_ids = RequestIds()
        self.vouching = Vouching(self.got, lambda names: self.backlog.add(self._pieces(names)), answered=False)

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
        states = HttpTransport(
            authorization(self.config.engine), largest_reply=sys.maxsize
        )  # as large as a sample is long
        async with states as self.transport, asyncio.TaskGroup() as group:
            canary = Canary(self.config, self.target, self.adapter, self.transport, self.state)
            self.supervisor = Supervisor(
                self.config, ceiling, held, self.pool, canary, self.transport, self.vouching, self.say
            )
            self.sender = Sender(settings, self.pool, self.transport)
            self.blame = Blame(settings, self.adapter, self.pool, self.transport, self.say, random.Random())
            helpers = [group.create_task(self.supervisor.run()), group.create_task(self._keep_reporting())]
            while self.backlog.open:
                await asyncio.wait([group.create_task(self._worker()) for _ in range(ceiling)])
                await self.supervisor.close()  # a bad canary puts rows back into the backlog
            self.vouching.release()
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
        name = self.request_ids.make(digest(row.id)[:32], len(self.capture.sglang_layers))
        request = states_request(name, row.input_ids)
        server = await self.pool.acquire(float(tokens), piece.attempts.avoid)
        begun = time.monotonic()
        reply = await self.sender.send(server, states_call(request), tokens, float(tokens))
        if isinstance(reply, Failure):
            return await self._failed(piece, server, request.id, begun, reply, None)
        number = self.vouching.arrived(server.url)
        self.got.arrived(row.id, server.url)
        # Parsing, hashing and fsync leave the interpreter free for other replies.
        result = await asyncio.to_thread(self._keep, row, request, reply)
        self.got.reading.discard(row.id)
        if self.vouching.forget_tainted(row.id):
            self.store.forget(row.id, self.capture.tensor)
            return 0.0
        if isinstance(result, Failure):
            return await self._failed(piece, server, request.id, begun, result, number)
        if result is not None:
            self.got.stored[row.id] = result
        self.got.done[row.id] = tokens
        self.pool.succeeded(server, tokens, time.monotonic() - begun)
        self.vouching.answered(server.url)
        return None

    def _keep(self, row: CorpusRow, request: Request, reply: Reply) -> Stored | Failure | None:
        states = read_states(self.adapter, request, self.capture.width, row.id, reply, time.time())
        if isinstance(states, Failure):
            return states
        facts = self.supervisor.facts
        engine = f"{SGLang.kind} {facts.version}" if facts and facts.version else SGLang.kind
        return self.store.write(row, {**self.store.part(row), self.capture.tensor: states}, engine)

    async def _failed(
        self,
        piece: Piece,
        server: PooledEndpoint,
        request_id: str,
        begun: float,
        failure: Failure,
        number: int | None,
    ) -> float | None:
        """Seconds until the next try; None when the row is given up. `number` is its reply's, if there was one."""
        next_try = await self.blame.next_try(server, request_id, begun, piece.attempts, failure)
        if not isinstance(next_try, GivenUp):
            return next_try
        give_up = partial(self._give_up, piece.row.id, next_try.reason)
        if next_try.refused and number is not None:
            self.vouching.refused_work(server.url, number, piece.row.id, next_try.reason, give_up)
        else:
            give_up()
        return None

    def _give_up(self, name: str, reason: str) -> None:
        self.got.failed[name] = reason
        self.say(f"warning: no hidden states of sample {name}: {reason}")

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            if self.pool.ready():
                self.say(self.line(time.monotonic() - self.begun))

    def line(self, seconds: float) -> str:
        """Progress, `seconds` after the beginning."""
        done, failed = self.got.done, self.got.failed
        tokens, left = sum(done.values()), sum(self.missing.values())
        left -= tokens + sum(self.missing[name] for name in failed)
        rate = tokens / max(seconds, 1e-9)
        return (
            f"{self.capture.name} {len(done)}/{len(self.missing)} failed {len(failed)} · {rate:.0f} tok/s · "
            f"{self.pool.in_flight} in flight · eta {duration(left / rate / 3600 if rate else None)}"
        )


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error that a group of tasks died of."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
