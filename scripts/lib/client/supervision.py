"""Keeps the pool in line with the world: the lease's endpoints and share, load, hangs, canaries.

Answers of an endpoint are trusted once a canary passed after them. Those that came since the last good
canary of an endpoint that turns out to be broken are discarded and asked for again.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from scripts.lib.client.canary import Canary, Refused
from scripts.lib.client.pool import Pool, Server
from scripts.lib.client.transport import Transport
from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.engines.base import Call, EngineFacts, Failure
from scripts.lib.engines.metrics import MetricNames, read_metrics
from scripts.lib.fleet.lease import Lease

_LOOK_SECONDS = 1.0
_HURRY_SECONDS = 0.05  # while nothing is ready, or in flight still grows
_METRICS_SECONDS = 5.0  # external endpoints, whose load nobody publishes
# Odd answers in a row (one token repeated, nothing, a refusal) that call for a canary at once.
_ODD_ANSWERS = 5
_PATIENCE_SECONDS = 15.0  # without any endpoint, until that is said: a restart is no news


class Answers(Protocol):
    """The answers that canaries vouch for. Each has a position, in the order of their arrival."""

    @property
    def position(self) -> int:
        """Where the next answer will stand."""

    def prove(self, server: Server) -> None:
        """What `server` answered before `server.trusted` is proven, for later jobs as well."""

    def distrust(self, server: Server, *, refusals: bool = False) -> None:
        """Discard what `server` answered from `server.trusted` on (or only what it refused), and ask for it again."""


class Supervisor:
    """Looks after the endpoints of one job."""

    def __init__(
        self,
        config: Config,
        ceiling: int,
        held: Lease,
        pool: Pool,
        canary: Canary,
        transport: Transport,
        answers: Answers,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.ceiling, self.held, self.pool = config, ceiling, held, pool
        self.canary, self.transport, self.answers, self.say = canary, transport, answers, say
        self.facts: EngineFacts | None = None
        self.context_length: int | None = None  # the shortest that an endpoint serves
        self._tests: dict[asyncio.Task, Server] = {}

    async def run(self) -> None:
        """Until cancelled. Raises UserError when there is no hope of an endpoint."""
        helpers = [asyncio.create_task(self._follow()), asyncio.create_task(self._watch())]
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

    def _start_tests(self) -> None:
        """Begin tests of endpoints that are not in use, and canaries of those that are."""
        for test in [test for test in self._tests if test.done()]:
            del self._tests[test]
            test.result()
        due = self.pool.due_for_test()
        every = self.config.transport.canary_minutes * 60
        due += [
            server
            for server in self.pool.ready()
            if not server.testing and (self.pool.clock() - server.proven > every or server.odd >= _ODD_ANSWERS)
        ]
        for server in due:
            self._start_test(server)

    def _start_test(self, server: Server) -> asyncio.Task:
        server.testing = True  # two at once would count the same answers as proven twice
        test = asyncio.create_task(self.test(server))
        self._tests[test] = server
        return test

    async def test(self, server: Server) -> None:
        """Probe (an endpoint that is new or was out) and canary; then in, out, or later again."""
        server.odd = 0
        try:
            if server.status != "ready" and not await self._probe(server):
                return
            # What arrives from here on, the next canary has to prove.
            proven, position = server.unproven, self.answers.position
            problem = await self.canary.ask(server.url)
            if isinstance(problem, str):
                # Hosted APIs answer nothing now and then (req_llm issue 944); a broken engine does it again.
                problem = await self.canary.ask(server.url)
            if problem is None:
                server.unproven -= proven
                server.trusted = position
                if proven:
                    self.answers.prove(server)
                self.pool.admit(server)
                return
            if isinstance(problem, Failure):
                self._unreachable(server, problem)
                return
            # Refused (a bad key, an empty balance, a broken server): answers that came before are as good as ever.
            refused = isinstance(problem, Refused)
            if refused:
                reason = f"refuses its canary: {problem.reason}"
                self.say(f"{server.url} {reason}; what it has refused since its last good one is asked again")
            else:
                reason = f"fails its canary: {problem}"
                self.say(f"{server.url} {reason}; {server.unproven} answers since its last good one")
            if server.status == "ready":
                self.pool.take_out(server, reason)
            self.answers.distrust(server, refusals=refused)
            self.pool.postpone(server, reason)
        finally:
            server.testing = False

    async def _probe(self, server: Server) -> bool:
        facts = await self.canary.probe(server.url)
        if isinstance(facts, Failure):
            self._unreachable(server, facts)
            return False
        self.facts = facts
        if facts.context_length is not None:
            self.context_length = min(self.context_length or facts.context_length, facts.context_length)
        return True

    def _unreachable(self, server: Server, failure: Failure) -> None:
        """A canary without an answer says nothing about the answers before it."""
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if server.status == "ready":
            # Busy servers may be slow to answer; failing requests will take it out if it is more.
            server.proven = self.pool.clock()
        else:
            self.pool.postpone(server, failure.reason)

    async def close(self) -> None:
        """A last canary for every endpoint with answers that are not proven yet."""
        # Those under way may void answers; what came after they began, they don't prove.
        await asyncio.gather(*(test for test, server in self._tests.items() if server.unproven))
        await asyncio.gather(*(self._start_test(server) for server in self.pool.ready() if server.unproven))

    async def _watch(self) -> None:
        """Let the number in flight grow in small steps; break off what takes too long. Waits for nobody."""
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
