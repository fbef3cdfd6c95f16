"""Whose fault a failure is: the work's, the endpoint's, or nobody's; and when the work is tried again."""

import datetime
import random
from collections.abc import Callable
from dataclasses import replace

from scripts.lib.client.attempts import Attempts, GivenUp
from scripts.lib.client.pool import Pool, PooledEndpoint
from scripts.lib.client.transport import HttpTransport
from scripts.lib.config.model import Transport
from scripts.lib.core.errors import UserError
from scripts.lib.core.units import duration
from scripts.lib.engines.base import Adapter, Failure

_WARN_SECONDS = 10.0
_SAID_SECONDS = 0.5  # pauses from so long on are told


class Blame:
    """The failures of one job."""

    def __init__(
        self,
        settings: Transport,
        adapter: Adapter,
        pool: Pool,
        transport: HttpTransport,
        say: Callable[[str], None],
        jitter: random.Random,
    ) -> None:
        self.settings, self.adapter, self.pool, self.transport = settings, adapter, pool, transport
        self.say, self.jitter = say, jitter
        self._warned: dict[str, float] = {}  # when a kind of failure was last told

    async def next_try(
        self, server: PooledEndpoint, request_id: str, sent_at: float, attempts: Attempts, failure: Failure
    ) -> float | GivenUp:
        """Seconds until work is to be tried again after a failure at `server`, or why it is not.

        Raises UserError when no work can be done: a fatal failure, or a limit that resets only in hours.
        """
        failure = await self._assign(server, request_id, sent_at, attempts, failure)
        return attempts.failed(failure, self.pool.successes, self.settings, self.jitter)

    async def _assign(
        self, server: PooledEndpoint, request_id: str, sent_at: float, attempts: Attempts, failure: Failure
    ) -> Failure:
        """Take note of a failure where it belongs; returns it as it counts for the work."""
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if failure.kind == "permanent":
            self.pool.saw(server)
            return failure
        attempts.avoid = server.url
        if server.status != "ready" and failure.kind == "retry":
            # Broken off because the endpoint was taken out: not the work's fault.
            failure = replace(failure, kind="wait", reason=f"broken off: {server.reason}", retry_after=None)
        elif long_rest(failure, self.settings):
            let_rest(server, failure, self.settings, self.pool, self.say)
            failure = replace(failure, kind="wait", retry_after=None)
        elif failure.kind == "throttle":
            self._throttled(server, sent_at, failure)
        elif failure.kind == "wait":
            self.pool.failed(server, failure.reason, suspect=True)
        elif failure.kind == "retry":
            # The same work failing again while nothing else is answered: a canary decides whose fault it is.
            self.pool.failed(server, failure.reason, suspect=attempts.successes_seen == self.pool.successes)
        self._warn(server, failure)
        if failure.billed:
            await self.transport.abort(server.url, self.adapter.abort(request_id))
        return failure

    def _throttled(self, server: PooledEndpoint, sent_at: float, failure: Failure) -> None:
        pause = self.pool.throttled(server, sent_at, failure.retry_after)
        if pause >= _SAID_SECONDS:
            self.say(f"{server.url} paused until {time_in(pause)}: {failure.reason}")

    def _warn(self, server: PooledEndpoint, failure: Failure) -> None:
        """Say what fails, each kind at most every ten seconds; the progress line has the number."""
        now = self.pool.clock()
        if failure.kind != "free" and now - self._warned.get(failure.kind, float("-inf")) >= _WARN_SECONDS:
            self._warned[failure.kind] = now
            self.say(f"{failure.kind}: {server.url}: {failure.reason}")


def long_rest(failure: Failure, settings: Transport) -> bool:
    """Whether an endpoint wants to be left alone for longer than anybody waits for one."""
    return (failure.retry_after or 0.0) > settings.outage_seconds


def let_rest(
    server: PooledEndpoint, failure: Failure, settings: Transport, pool: Pool, say: Callable[[str], None]
) -> None:
    """Take out an endpoint whose limit resets only in hours. Raises UserError when it was the last one."""
    assert failure.retry_after is not None
    if server.status != "out" or not server.paused_until > pool.clock():
        pool.rest(server, failure.reason, failure.retry_after)
        if not pool.all_rest(settings.outage_seconds):
            say(f"{server.url} paused until {time_in(failure.retry_after)}, the others go on: {failure.reason}")
    if pool.all_rest(settings.outage_seconds):
        raise UserError(
            f"{server.url}: {failure.reason}: its limit resets in {duration(failure.retry_after / 3600)}: run again "
            "then, nothing is lost"
        )


def time_in(seconds: float) -> str:
    """The time of day in so many seconds, with the date where it is another one."""
    now = datetime.datetime.now()
    try:
        then = now + datetime.timedelta(seconds=seconds)
    except OverflowError:
        return "the end of time"
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")
