"""Which endpoint gets the next request, and how many may be in flight.

Each endpoint has its own limit, found by additive increase and multiplicative decrease inside the
job's share of the lane; requests go to the endpoint that would be done first, by outstanding tokens
over measured speed, so a slow server gets less. An endpoint that fails, hangs or vanishes is taken
out, and comes back after a canary. Decisions are plain functions of an injected clock.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scripts.lib.engines.metrics import EngineMetrics

_DECREASE = 0.7  # after 429, 503, timeouts
_QUEUE_SHARE = 0.25  # queued over running: a short queue keeps the engine busy
_FULL_CACHE = 0.95
_COOLDOWN = 2.0  # s between decreases: a burst of errors is one signal
_SMOOTHING = 0.1  # weight of a new observation
_SUSPECT_AFTER = 3  # failures in a row without any success
_LIVELY = 2.0  # s since the last success within which one failure is no reason to doubt an endpoint
_GENTLE = 4.0  # at least so many at once after an outage
_SLOW = 0.75  # of the fastest one's speed: below it a server is spared long answers at the end
_LONG = 2.0  # times the expected length: where waiting for a fast server pays, measured by benchmarks.fleet
_PAUSE_AFTER = 3  # refusals in a row without any success
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # s until an endpoint that refuses is asked again


@dataclass(eq=False)
class PooledEndpoint:
    """One endpoint as the pool sees it."""

    url: str
    incarnation: int
    status: str = "new"  # new | ready | out
    in_flight: int = 0
    outstanding: float = 0.0  # tokens expected of the requests in flight
    limit: float = 1.0
    threshold: float = float("inf")  # below it the limit grows by one per success, above by one per round
    speed: float | None = None  # tokens per second of one request, smoothed
    failures: int = 0  # since the last success
    last_sign: float = 0.0  # clock of the last success, admission or seen progress
    last_success: float = float("-inf")
    last_decrease: float = float("-inf")
    queue_long: bool = False
    mark: tuple = ()  # of the engine's progress
    reason: str = ""  # why it is not ready
    timeouts: dict[asyncio.Timeout, float] = field(default_factory=dict)  # of the requests in flight, and when they end
    refusals: int = 0  # 429 and the like since the last success
    pauses: int = 0  # for these, in a row
    paused_until: float = float("-inf")
    spared: bool = False  # too slow for the last prompts

    def cost(self, expected: float, typical_speed: float) -> float:
        """Seconds of work ahead of a request that is sent here now."""
        return (self.outstanding + expected) / (self.speed or typical_speed)


class Pool:
    """The endpoints of one job."""

    def __init__(self, ceiling: int, clock: Callable[[], float], ramp_per_second: float, idle_seconds: float) -> None:
        self.ceiling = ceiling
        self.clock = clock
        self.ramp_per_second = ramp_per_second
        self.idle_seconds = idle_seconds
        self.servers: dict[str, PooledEndpoint] = {}
        self.in_flight = 0
        self.left: Callable[[], int] | None = None  # tells the prompts that are not begun yet
        self.interval = 0.0  # seconds between answers, smoothed
        self._last_answer: float | None = None
        self.successes = 0  # answers and passed canaries; a prompt's failure counts only between two of them
        self._ramp_from: float | None = None
        self._waiters: deque[tuple[float, str | None, asyncio.Future[PooledEndpoint]]] = deque()

    # --- who is there ---

    def update(self, endpoints: Iterable[tuple[str, int]]) -> list[PooledEndpoint]:
        """Take over the list of (url, incarnation). Returns servers that were lost, for the log."""
        present, lost = set(), []
        for url, incarnation in endpoints:
            present.add(url)
            server = self.servers.get(url)
            if server is None or server.incarnation != incarnation:
                if server is not None:
                    self.take_out(server, "was restarted")
                self.servers[url] = PooledEndpoint(url, incarnation)
        for url in [url for url in self.servers if url not in present]:
            server = self.servers.pop(url)
            if server.status == "ready":
                lost.append(server)
            self.take_out(server, "is gone")
        return lost

    def ready(self) -> list[PooledEndpoint]:
        return [server for server in self.servers.values() if server.status == "ready"]

    def admit(self, server: PooledEndpoint) -> None:
        """A canary passed: requests may go there. A server that failed before starts gently."""
        if self.servers.get(server.url) is not server:
            return
        server.last_sign = now = self.clock()
        self.successes += 1
        if server.status == "ready":
            return
        # What was in flight before an outage was too much, or not: half of it, and up from there.
        before = min(server.limit, float(self.ceiling))
        server.limit = max(_GENTLE, before / 2) if server.status == "out" else float("inf")
        server.status, server.reason, server.failures = "ready", "", 0
        if self._ramp_from is None or self.in_flight == 0:
            self._ramp_from = now
        self.wake()

    def take_out(self, server: PooledEndpoint, reason: str, *, break_off: bool = True) -> None:
        """No more requests; those in flight are broken off, so that they can go elsewhere.

        Without `break_off` they may end: a router that has no worker for one request (sglang issue 13894), or
        a proxy that failed one, is still working on the others, and what they have generated is paid for.
        """
        server.status, server.reason = "out", reason
        if not break_off:
            return
        _end(server.timeouts)
        server.timeouts.clear()

    # --- how many ---

    def allowed(self) -> int:
        """Requests that may be in flight now: the share, reached in a ramp."""
        if self._ramp_from is None:
            return 0
        ramp = 1 + (self.clock() - self._ramp_from) * self.ramp_per_second
        return max(1, min(self.ceiling, int(ramp)))

    @property
    def ramping(self) -> bool:
        return self._ramp_from is not None and self.allowed() < self.ceiling

    def throttled(self, server: PooledEndpoint, sent_at: float, retry_after: float | None = None) -> float:
        """The server is saturated: fewer at once, and none for a while when it refuses everything.

        `sent_at`: when the refused request was sent. All that were sent before a pause ends are one signal, which is as
        long as the server says itself. Returns the seconds of a pause that begins now, else 0.
        """
        self._decrease(server, _DECREASE)
        server.refusals += 1
        if server.refusals < _PAUSE_AFTER:
            return 0.0
        now = self.clock()
        if sent_at < server.paused_until:
            if retry_after is not None:
                server.paused_until = max(server.paused_until, now + retry_after)
            return 0.0
        server.pauses += 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(server.pauses - 1, 10))
        pause = pause if retry_after is None else retry_after
        server.paused_until = now + pause
        return pause

    def rest(self, server: PooledEndpoint, reason: str, seconds: float) -> None:
        """The server does nothing more for long: it is out, and not even tested before."""
        self.take_out(server, reason, break_off=False)
        server.paused_until = self.clock() + seconds

    def all_rest(self, longer: float) -> bool:
        """Whether every server rests for longer than so many seconds."""
        return all(server.paused_until - self.clock() > longer for server in self.servers.values())

    def _decrease(self, server: PooledEndpoint, factor: float) -> None:
        now = self.clock()
        if now - server.last_decrease >= _COOLDOWN:
            server.last_decrease = now
            server.limit = server.threshold = max(1.0, min(server.limit, server.in_flight + 1) * factor)

    def _increase(self, server: PooledEndpoint) -> None:
        if not server.queue_long and server.limit < self.ceiling:
            server.limit += 1.0 if server.limit < server.threshold else 1.0 / server.limit

    def observe(self, url: str, metrics: EngineMetrics, mark: tuple = ()) -> None:
        """Take the engine's own word on its load; `mark` changes whenever it did some work."""
        server = self.servers.get(url)
        if server is None:
            return
        if mark and mark != server.mark:
            server.mark, server.last_sign = mark, self.clock()
        queued, running = metrics.queued or 0, metrics.running or 0
        full = metrics.kv_usage is not None and metrics.kv_usage > _FULL_CACHE and queued > 0
        wanted = running if full else max(running + 1.0, running * (1 + _QUEUE_SHARE))
        server.queue_long = running + queued > wanted
        if server.queue_long:
            # Our part of what is too much. Not a factor at each look: the queue goes on for as long as answers take.
            fair = max(1.0, server.in_flight * wanted / (running + queued))
            if fair < server.limit:
                server.limit = server.threshold = fair

    # --- one request ---

    def pick(self, expected: float, avoid: str | None = None) -> PooledEndpoint | None:
        """The ready server that would be done first and has room; another than `avoid` when there is one."""
        if self.in_flight >= self.allowed():
            return None
        now = self.clock()
        free = [s for s in self.ready() if s.in_flight < max(1.0, s.limit) and s.paused_until <= now]
        free = self._in_time(free, expected)
        if len(free) < 2:
            return free[0] if free else None
        speeds = [s.speed for s in free if s.speed]
        typical = sum(speeds) / len(speeds) if speeds else 1.0
        return min(free, key=lambda s: (s.url == avoid, s.cost(expected, typical)))

    def _in_time(self, free: list[PooledEndpoint], expected: float) -> list[PooledEndpoint]:
        """Without the slow servers, once a long answer begun there would end last of all.

        Near the end of the prompts it ends earlier when it waits for a place on a fast server: the others have
        nothing to do by then but to wait for it. A spared server runs empty and seems fast then, so it stays spared.
        """
        if self.left is None or len(self.servers) == 1:
            return free
        now = self.clock()
        fastest = max((s.speed or 0.0 for s in self.ready() if s.paused_until <= now), default=0.0)
        until_last = self.left() * self.interval
        for server in free:
            if server.speed is None or server.speed >= _SLOW * fastest:
                continue
            if _LONG * expected / server.speed > until_last + _LONG * expected / fastest:
                server.spared = True
        return [server for server in free if not server.spared] if any(not s.spared for s in self.ready()) else free

    async def acquire(self, expected: float, avoid: str | None = None) -> PooledEndpoint:
        """Wait for a server with room and take a place there; give it back with `release`."""
        if not self._waiters and (server := self.pick(expected, avoid)):
            self._take(server, expected)
            return server
        place: asyncio.Future[PooledEndpoint] = asyncio.get_running_loop().create_future()
        self._waiters.append((expected, avoid, place))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(place.result(), expected)
            raise

    def _take(self, server: PooledEndpoint, expected: float) -> None:
        if server.in_flight == 0:
            server.last_sign = max(server.last_sign, self.clock())
        server.in_flight += 1
        server.outstanding += expected
        self.in_flight += 1

    def release(self, server: PooledEndpoint, expected: float) -> None:
        server.in_flight -= 1
        server.outstanding = max(0.0, server.outstanding - expected)
        self.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Give places to those who wait, first come first served."""
        while self._waiters:
            expected, avoid, place = self._waiters[0]
            if place.done():  # cancelled
                self._waiters.popleft()
                continue
            server = self.pick(expected, avoid)
            if server is None:
                return
            self._waiters.popleft()
            self._take(server, expected)
            place.set_result(server)

    def saw(self, server: PooledEndpoint) -> None:
        """It has said something: it doesn't hang."""
        server.last_sign = self.clock()

    def succeeded(self, server: PooledEndpoint, tokens: int, seconds: float) -> None:
        self.successes += 1
        server.failures = server.refusals = server.pauses = 0
        server.last_sign = server.last_success = self.clock()
        if tokens > 0 and seconds > 0:
            speed = tokens / seconds
            server.speed = speed if server.speed is None else server.speed + _SMOOTHING * (speed - server.speed)
        now, before = server.last_success, self._last_answer
        if before is not None:
            self.interval += (now - before - self.interval) * (_SMOOTHING / 10 if self.interval else 1.0)
        self._last_answer = now
        self._increase(server)

    def failed(self, server: PooledEndpoint, reason: str, suspect: bool = False) -> None:
        """A request failed in a way that may be the server's fault; several in a row take it out.

        A `suspect` failure (refused, no workers, no such model) does so alone, unless the server has just answered:
        a router that fails one request in a hundred is no outage.
        """
        server.failures += 1
        suspect = suspect and self.clock() - server.last_success > _LIVELY
        if server.status == "ready" and (suspect or server.failures >= _SUSPECT_AFTER):
            self.take_out(server, reason, break_off=False)

    def check_progress(self) -> list[PooledEndpoint]:
        """Break off requests whose time is up, and all of servers that show no sign of progress.

        Takes these servers out and returns them.
        """
        now = self.clock()
        for server in self.servers.values():
            _end(timeout for timeout, at in server.timeouts.items() if at <= now)
        hung = [s for s in self.servers.values() if s.timeouts and now - s.last_sign > self.idle_seconds]
        for server in hung:
            self.take_out(server, f"no answer for {now - server.last_sign:.0f} s")
        return hung


def _end(timeouts: Iterable[asyncio.Timeout]) -> None:
    """Break off the requests that these are for."""
    for timeout in timeouts:
        if not timeout.expired():
            timeout.reschedule(0.0)
