"""Sends the requests of one job, and says whose fault a failure is: the work's, the endpoint's, or nobody's."""

from collections.abc import Callable

from scripts.lib.client.attempts import Attempts
from scripts.lib.client.deadline import Deadline
from scripts.lib.client.pool import Pool, Server
from scripts.lib.client.transport import Transport
from scripts.lib.config.model import Transport as Settings
from scripts.lib.core.errors import UserError
from scripts.lib.core.units import duration
from scripts.lib.engines.base import Adapter, Call, Failure, Reply

_WARN_SECONDS = 10.0


class Sender:
    """The way from places in the pool to replies."""

    def __init__(
        self,
        settings: Settings,
        adapter: Adapter,
        pool: Pool,
        transport: Transport,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self.settings, self.adapter, self.pool, self.transport = settings, adapter, pool, transport
        self.clock, self.say = clock, say
        self._warned: dict[str, float] = {}  # when a kind of failure was last told

    async def send(self, server: Server, call: Call, max_tokens: int, expected: float) -> Reply | Failure:
        """One call on a place that `Pool.acquire` gave for `expected` tokens; gives the place back.

        Its time follows from the `max_tokens` that it may take (to be generated, or read); an endpoint that is taken
        out breaks it off before.
        """
        if server.status != "ready":  # taken out since it gave the place
            self.pool.release(server, expected)
            return Failure("wait", f"broken off: {server.reason}")
        begun = self.clock()
        seconds = self.settings.base_seconds + max_tokens / self.settings.min_tokens_per_second
        deadline = Deadline(begun + seconds)
        server.deadlines.add(deadline)
        try:
            with deadline:
                return await self.transport.call(server.url, call)
        except TimeoutError:
            return Failure("retry", f"no answer within {self.clock() - begun:.0f} s", billed=True)
        finally:
            server.deadlines.discard(deadline)
            self.pool.release(server, expected)

    async def blame(self, server: Server, request_id: str, attempts: Attempts, failure: Failure) -> Failure:
        """Take note of a failure where it belongs; returns it as it counts for the work.

        Raises UserError when no work can be done: a fatal failure, or a limit that resets only in hours.
        """
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if failure.kind == "permanent":
            return failure
        if (failure.retry_after or 0.0) > self.settings.outage_seconds:
            raise UserError(
                f"{server.url}: {failure.reason}: its limit resets in {duration(failure.retry_after / 3600)}: run again "
                "then, nothing is lost"
            )
        attempts.avoid, billed = server.url, failure.billed
        if server.status != "ready" and failure.kind == "retry":
            # Broken off because the endpoint was taken out: not the work's fault.
            failure = Failure("wait", f"broken off: {server.reason}")
        elif failure.kind == "throttle":
            self.pool.throttled(server, failure.retry_after)
        elif failure.kind == "wait":
            self.pool.failed(server, failure.reason, suspect=True)
        elif failure.kind == "retry":
            # The same work failing again while nothing else is answered: a canary decides whose fault it is.
            self.pool.failed(server, failure.reason, suspect=attempts.successes_seen == self.pool.successes)
        self._warn(server, failure)
        if billed:
            await self.transport.abort(server.url, self.adapter.abort(request_id))
        return failure

    def _warn(self, server: Server, failure: Failure) -> None:
        """Say what fails, each kind at most every ten seconds; the progress line has the number."""
        now = self.clock()
        if failure.kind != "free" and now - self._warned.get(failure.kind, float("-inf")) >= _WARN_SECONDS:
            self._warned[failure.kind] = now
            self.say(f"{failure.kind}: {server.url}: {failure.reason}")
