"""Keeps the pool in line with the world: the lease's endpoints and share, load, hangs, canaries.

What a canary's answer means for answers that came before it is `vouching`'s.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scripts.lib.client.blame import let_rest, long_rest
from scripts.lib.client.canary import Canary, CanaryRefused
from scripts.lib.client.pool import Pool, PooledEndpoint
from scripts.lib.client.transport import HttpTransport
from scripts.lib.client.vouching import Vouching
from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.engines.base import Call, EngineFacts, Failure
from scripts.lib.engines.metrics import MetricNames, read_metrics
from scripts.lib.fleet.lease import Lease

_LOOK_SECONDS = 1.0
_HURRY_SECONDS = 0.05  # while nothing is ready, or in flight still grows
_METRICS_SECONDS = 5.0  # external endpoints, whose load nobody publishes
_PATIENCE_SECONDS = 15.0  # without any endpoint, until that is said: a restart is no news
_BUSY = 4  # requests in flight, at least, that make an endpoint busy
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # s between the tests of an endpoint that fails them


@dataclass(slots=True)
class _Watch:
    """What the supervisor knows of an endpoint in the pool."""

    test_at: float = float("-inf")  # when an endpoint that is not ready is tested next
    failed_tests: int = 0  # in a row
    testing: bool = False
    passed_at: float = 0.0  # clock of the last good canary
    passed_busy: bool = False  # one of them among many requests, since the endpoint was admitted


class Supervisor:
    """Looks after the endpoints of one job."""

    def __init__(
        self,
        config: Config,
        ceiling: int,
        held: Lease,
        pool: Pool,
        canary: Canary,
        transport: HttpTransport,
        vouching: Vouching,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.ceiling, self.held, self.pool = config, ceiling, held, pool
        self.canary, self.transport, self.vouching, self.say = canary, transport, vouching, say
        self.facts: EngineFacts | None = None
        self.context_length: int | None = None  # the shortest that an endpoint serves, for prompt and answer together
        self._warned: set[str] = set()
        self._tests: dict[asyncio.Task, PooledEndpoint] = {}
        self._watches: WeakKeyDictionary[PooledEndpoint, _Watch] = WeakKeyDictionary()

    async def run(self) -> None:
        """Until cancelled. Raises UserError when there is no hope of an endpoint."""
        helpers = [asyncio.create_task(self._follow()), asyncio.create_task(self._keep_going())]
        if self.config.engine.endpoints and (metrics := self.canary.adapter.metrics):
            helpers.append(asyncio.create_task(self._poll_metrics(metrics)))
        try:
            await asyncio.gather(*helpers)
        finally:
            for task in (*helpers, *self._tests):
                task.cancel()
            await asyncio.gather(*helpers, *self._tests, return_exceptions=True)

    async def _follow(self) -> None:
        """The lease's endpoints, share and load; tests that are due."""
        begun = down_since = self.pool.clock()
        announced = complained = False
        while True:
            endpoints = await asyncio.to_thread(self.held.endpoints, _LOOK_SECONDS)
            for server in self.pool.update((endpoint.url, endpoint.incarnation) for endpoint in endpoints):
                self.say(f"{server.url} is gone: its requests go elsewhere")
            self.pool.ceiling = self.held.share(self.ceiling)
            for url, metrics in self.held.metrics().items():
                self.pool.observe(url, metrics)
            self._start_tests()
            now = self.pool.clock()
            if self.pool.ready() or not endpoints:
                down_since, complained = now, False
            elif now - down_since > self.config.transport.outage_seconds:
                raise UserError(
                    f"no endpoint has worked for {now - down_since:.0f} s ({self._reasons()}): run again when they "
                    "do, nothing is lost"
                )
            elif now - down_since > _PATIENCE_SECONDS and not complained:
                complained = True
                known = any(server.reason for server in self.pool.servers.values())
                self.say(
                    f"{'no endpoint works' if known else 'no endpoint has answered yet'} ({self._reasons()}): tried again, for "
                    f"{self.config.transport.outage_seconds:.0f} s at most (transport.outage_seconds)"
                )
            if not announced and self.pool.ready():
                announced = True
                self.say(f"{len(self.pool.ready())} of {len(endpoints)} endpoints ready after {now - begun:.1f} s")
            self.pool.wake()
            await asyncio.sleep(_LOOK_SECONDS if self.pool.ready() else _HURRY_SECONDS)

    def _reasons(self) -> str:
        return "; ".join(
            f"{server.url}: {server.reason or 'starting or busy'}" for server in self.pool.servers.values()
        )

    def watch(self, server: PooledEndpoint) -> _Watch:
        return self._watches.setdefault(server, _Watch())

    def due_for_test(self) -> list[PooledEndpoint]:
        """Endpoints that are not ready and are to be tested now."""
        now = self.pool.clock()
        out = [server for server in self.pool.servers.values() if server.status != "ready"]
        return [s for s in out if not self.watch(s).testing and max(self.watch(s).test_at, s.paused_until) <= now]

    def _start_tests(self) -> None:
        """Begin tests of endpoints that are not in use, and canaries of those that are."""
        for test in [test for test in self._tests if test.done()]:
            del self._tests[test]
            test.result()
        for server in self.due_for_test():
            self._start_test(server)
        latest = self.pool.clock() - self.config.transport.canary_minutes * 60
        for server in self.pool.ready():
            watch = self.watch(server)
            unproven_busy = self._busy(server) and not watch.passed_busy
            if not watch.testing and (watch.passed_at < latest or unproven_busy or self.vouching.odd(server.url)):
                self._start_test(server)

    def _busy(self, server: PooledEndpoint) -> bool:
        """Whether an endpoint has half of what it may get: many engines that are broken are so in large batches only."""
        return server.in_flight >= max(_BUSY, self.pool.ceiling / (2 * max(1, len(self.pool.ready()))))

    def _start_test(self, server: PooledEndpoint) -> asyncio.Task:
        self.watch(server).testing = True
        test = asyncio.create_task(self.test(server))
        self._tests[test] = server
        return test

    async def test(self, server: PooledEndpoint) -> None:
        """Probe (an endpoint that is new or was out) and canary; then in, out, or later again."""
        sent, busy = self.vouching.moment(server.url), self._busy(server)
        try:
            if server.status != "ready":
                if not await self._probe(server):
                    return
                sent = self.vouching.moment(server.url)
            problem = await self.canary.ask(server.url)
            if isinstance(problem, str):
                # Hosted APIs answer nothing now and then (req_llm issue 944); a broken engine does it again.
                problem = await self.canary.ask(server.url)
            if problem is None:
                self.vouching.passed(server.url, sent)
                self._admit(server, busy=busy)
            elif isinstance(problem, Failure):
                self._unreachable(server, problem)
            elif isinstance(problem, CanaryRefused):
                # A bad key, an empty balance, a broken server.
                reason = f"refuses its canary: {problem.reason}"
                self.say(f"{server.url} {reason}; what it has refused since its last good one is asked again")
                self._take_out(server, reason)
                self.vouching.refused(server.url)
            else:
                reason = f"fails its canary: {problem}"
                doubtful = self.vouching.doubtful(server.url)
                self.say(f"{server.url} {reason}; {doubtful} answers since its last good one")
                self._take_out(server, reason)
                self.vouching.failed(server.url)
        finally:
            self.watch(server).testing = False

    async def _probe(self, server: PooledEndpoint) -> bool:
        facts = await self.canary.probe(server.url)
        if isinstance(facts, Failure):
            self._unreachable(server, facts)
            return False
        self.facts = facts
        room = facts.room or facts.context_length
        if room is not None:
            self.context_length = min(self.context_length or room, room)
        if facts.warning and server.url not in self._warned:
            self._warned.add(server.url)
            self.say(f"warning: {server.url}: {facts.warning}")
        return True

    def _unreachable(self, server: PooledEndpoint, failure: Failure) -> None:
        """A canary without an answer says nothing about the answers before it."""
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if long_rest(failure, self.config.transport):
            let_rest(server, failure, self.config.transport, self.pool, self.say)
        elif server.status == "ready":
            # Busy servers may be slow to answer; failing requests will take it out if it is more.
            self.watch(server).passed_at = self.pool.clock()
        else:
            self._postpone(server, failure.reason)

    def _admit(self, server: PooledEndpoint, *, busy: bool) -> None:
        watch = self.watch(server)
        watch.passed_at, watch.failed_tests = self.pool.clock(), 0
        watch.passed_busy = busy or (watch.passed_busy and server.status == "ready")
        self.pool.admit(server)

    def _take_out(self, server: PooledEndpoint, reason: str) -> None:
        if server.status == "ready":
            self.pool.take_out(server, reason)
        self._postpone(server, reason)

    def _postpone(self, server: PooledEndpoint, reason: str) -> None:
        """Test it again after a pause that doubles."""
        watch = self.watch(server)
        server.reason = reason
        watch.test_at = self.pool.clock() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**watch.failed_tests)
        watch.failed_tests += 1

    async def close(self) -> None:
        """A last canary for every endpoint with answers that are not proven yet."""
        doubtful = self.vouching.doubtful
        # Those under way may void answers; what came after they began, they don't prove.
        await asyncio.gather(*(test for test, server in self._tests.items() if doubtful(server.url)))
        await asyncio.gather(*(self._start_test(server) for server in self.pool.ready() if doubtful(server.url)))

    async def _keep_going(self) -> None:
        """Let the number in flight grow in small steps; take out what hangs. Waits for nobody."""
        while True:
            for server in self.pool.check_progress():
                self.say(f"{server.url} hangs ({server.reason}): taken out until a canary passes")
            await asyncio.sleep(_HURRY_SECONDS if self.pool.ramping else _LOOK_SECONDS)
            self.pool.wake()

    async def _poll_metrics(self, names: MetricNames) -> None:
        """Ask external endpoints for their load; one that doesn't tell is left to its answers."""
        while True:
            for server in self.pool.ready():
                reply = await self.transport.call_within(_METRICS_SECONDS, server.url, Call("GET", names.path))
                if not isinstance(reply, Failure) and reply.status == 200:
                    metrics, mark = read_metrics(names, reply.body.decode("utf-8", "replace"))
                    self.pool.observe(server.url, metrics, mark)
            await asyncio.sleep(_METRICS_SECONDS)
