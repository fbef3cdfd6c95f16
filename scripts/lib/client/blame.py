"""Whose fault a failure is: the work's, the endpoint's, or nobody's; and when the work is tried again."""

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
        self, server: PooledEndpoint, request_id: str, attempts: Attempts, failure: Failure
    ) -> float | GivenUp:
        """Seconds until work is to be tried again after a failure at `server`, or why it is not.

        Raises UserError when no work can be done: a fatal failure, or a limit that resets only in hours.
        """
        failure = await self._assign(server, request_id, attempts, failure)
        return attempts.failed(failure, self.pool.successes, self.settings, self.jitter)

    async def _assign(self, server: PooledEndpoint, request_id: str, attempts: Attempts, failure: Failure) -> Failure:
        """Take note of a failure where it belongs; returns it as it counts for the work."""
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if failure.kind == "permanent":
            self.pool.saw(server)
            return failure
        if (failure.retry_after or 0.0) > self.settings.outage_seconds:
            raise UserError(
                f"{server.url}: {failure.reason}: its limit resets in {duration(failure.retry_after / 3600)}: run again "
                "then, nothing is lost"
            )
        attempts.avoid = server.url
        if server.status != "ready" and failure.kind == "retry":
            # Broken off because the endpoint was taken out: not the work's fault.
            failure = replace(failure, kind="wait", reason=f"broken off: {server.reason}", retry_after=None)
        elif failure.kind == "throttle":
            self.pool.throttled(server, failure.retry_after)
        elif failure.kind == "wait":
            self.pool.failed(server, failure.reason, suspect=True)
        elif failure.kind == "retry":
            # The same work failing again while nothing else is answered: a canary decides whose fault it is.
            self.pool.failed(server, failure.reason, suspect=attempts.successes_seen == self.pool.successes)
        self._warn(server, failure)
        if failure.billed:
            await self.transport.abort(server.url, self.adapter.abort(request_id))
        return failure

    def _warn(self, server: PooledEndpoint, failure: Failure) -> None:
        """Say what fails, each kind at most every ten seconds; the progress line has the number."""
        now = self.pool.clock()
        if failure.kind != "free" and now - self._warned.get(failure.kind, float("-inf")) >= _WARN_SECONDS:
            self._warned[failure.kind] = now
            self.say(f"{failure.kind}: {server.url}: {failure.reason}")
