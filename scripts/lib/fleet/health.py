"""The clocks that decide about servers: progress that says that one isn't stuck, crashes and leases over time."""

from collections import deque
from dataclasses import dataclass, field

from scripts.lib.engines.metrics import EngineMetrics


@dataclass
class ProgressWatch:
    """Says when a server with requests has shown no progress for `limit` seconds."""

    limit: float
    since: float  # time of the last sign of life
    mark: tuple = ()

    def observe(self, now: float, metrics: EngineMetrics | None, mark: tuple = ()) -> bool:
        """Take a reading (None: the server did not answer). True when it looks hung: ask for a token to be sure."""
        if metrics is not None:
            idle = not metrics.running and not metrics.queued
            if idle or mark != self.mark:
                self.since = now
            self.mark = mark
        return now - self.since >= self.limit

    def alive(self, now: float) -> None:
        """The server has just generated a token."""
        self.since = now


@dataclass
class CrashBudget:
    """How often one server may be started again: `limit` times within an hour.

    A server that never worked, nor any like it, is tried only once more: its command or its machine is at fault, and the
    reason should be seen soon. Where others like it work, its start met something that passes (caches that all of them
    write, ports, memory), so it gets longer pauses and the whole budget.
    """

    limit: int
    window: float = 3600.0
    first_pause: float = 0.5
    first_pause_of_start: float = 5.0  # where others work and it never did
    longest_pause: float = 60.0
    _crashes: deque[float] = field(default_factory=deque)

    def crash(self, now: float, ever_ready: bool, others_work: bool = False) -> float | None:
        """Count a crash. Returns the seconds to wait before the next start, None when there is none left."""
        while self._crashes and now - self._crashes[0] >= self.window:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > (self.limit if ever_ready or others_work else min(1, self.limit)):
            return None
        first = self.first_pause if ever_ready or not others_work else self.first_pause_of_start
        return min(self.longest_pause, first * 2 ** (len(self._crashes) - 1))


@dataclass
class Linger:
    """How long servers stay up after the last lease: `seconds`, or not at all when asked to stop."""

    seconds: float
    free_since: float | None = None

    def over(self, now: float, leased: bool, stop_asked: bool) -> bool:
        """Take a look at the leases. True when the fleet is to end."""
        if leased:
            self.free_since = None
            return False
        if self.free_since is None:
            self.free_since = now
        return stop_asked or now - self.free_since >= self.seconds
