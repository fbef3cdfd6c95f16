"""Sends the requests of one job, each on its place in the pool and within its time."""

import asyncio

from scripts.lib.client.pool import Pool, PooledEndpoint
from scripts.lib.client.transport import HttpTransport
from scripts.lib.config.model import Transport
from scripts.lib.engines.base import Call, Failure, Reply


class Sender:
    """The way from places in the pool to replies."""

    def __init__(self, settings: Transport, pool: Pool, transport: HttpTransport) -> None:
        self.settings, self.pool, self.transport = settings, pool, transport

    async def send(self, server: PooledEndpoint, call: Call, max_tokens: int, expected: float) -> Reply | Failure:
        """One call on a place that `Pool.acquire` gave for `expected` tokens; gives the place back.

        Its time follows from the `max_tokens` that it may take (to be generated, or read); an endpoint that is taken
        out breaks it off before.
        """
        if server.status != "ready":  # taken out since it gave the place
            self.pool.release(server, expected)
            return Failure("wait", f"broken off: {server.reason}")
        begun = self.pool.clock()
        # Without a timer of its own, which would cost more than the rest of sending: the pool looks at all of them.
        timeout = asyncio.Timeout(None)
        seconds = self.settings.base_seconds + max_tokens / self.settings.min_tokens_per_second
        server.timeouts[timeout] = begun + seconds
        try:
            async with timeout:
                reply = await self.transport.call(server.url, call)
            if timeout in server.timeouts:
                return reply
            # It came in the moment in which its endpoint was taken out, and what that had said was discarded.
            return Failure("retry", "broken off", billed=True)
        except TimeoutError:
            return Failure("retry", f"no answer within {self.pool.clock() - begun:.0f} s", billed=True)
        finally:
            server.timeouts.pop(timeout, None)
            self.pool.release(server, expected)
