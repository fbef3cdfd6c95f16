"""Moves bytes between adapters and endpoints: what each way of failing means."""

import asyncio
import contextlib
import errno
import os
import ssl
import time
from collections.abc import Mapping
from types import TracebackType

from scripts.lib.client.connections import LARGEST_REPLY, Broken, Connections, Unreachable
from scripts.lib.client.proxies import proxies_of_environment
from scripts.lib.config.model import Engine
from scripts.lib.core import open_files
from scripts.lib.core.errors import UserError
from scripts.lib.core.secrets import keep_secret
from scripts.lib.engines.base import Call, Failure, Kind, Reply

# A kept connection that breaks sooner than this after the send was stale; later, the server broke it off.
_STALE_SECONDS = 1.0


def require_descriptors(concurrency: int) -> None:
    """Raise the limit of open files to what `concurrency` connections need, or refuse to start."""
    needed = 2 * concurrency + 256
    allowed = open_files.allow(needed)
    if allowed < needed:
        raise UserError(
            f"{concurrency} requests in flight need {needed} open files, the limit is {allowed}: raise it "
            f"(ulimit -Hn {needed}) or lower the lane's concurrency"
        )


def authorization(engine: Engine) -> dict[str, str]:
    """The header that carries the API key, if there is one. Raises UserError when the environment lacks it."""
    name = engine.api_key_env
    if not name:
        return {}
    key = os.environ.get(name, "").strip()  # a key that was read from a file ends with a line break
    if not key:
        raise UserError(f"engine.api_key_env: the environment variable {name} is not set: put the API key there")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"engine.api_key_env: what {name} holds is no API key: it has characters that no header may have"
        )
    keep_secret(key)
    return {"Authorization": f"Bearer {key}"}


class HttpTransport:
    """The connections to all endpoints. An async context manager."""

    def __init__(
        self, headers: Mapping[str, str] | None = None, *, hosted: bool = False, largest_reply: int = LARGEST_REPLY
    ) -> None:
        """`headers` go with every call (authorization). A reply of more than `largest_reply` bytes is broken off.

        `hosted` APIs are reached through the proxies of the environment, on a connection for each request: an answer
        that says nothing of its request must not be taken for another one's.
        """
        proxies = proxies_of_environment() if hosted else {}
        self._connections = Connections(headers or {}, largest_reply, keep=not hosted, proxies=proxies)

    async def __aenter__(self) -> "HttpTransport":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connections.close()

    async def call_within(self, seconds: float, url: str, call: Call) -> Reply | Failure:
        """`call` that may take some seconds at most."""
        try:
            async with asyncio.timeout(seconds):
                return await self.call(url, call)
        except TimeoutError:
            return Failure("retry", f"no answer within {seconds:.0f} s", billed=True)

    async def call(self, url: str, call: Call) -> Reply | Failure:
        """Send one call and read the whole reply, however long it takes; network faults come back as a Failure."""
        begun = time.monotonic()
        try:
            return await self._connections.exchange(url, call)
        except Unreachable as error:
            return _no_connection(url, error.error)
        except Broken as error:
            if error.kept and not error.answered and time.monotonic() - begun < _STALE_SECONDS:
                return Failure("free", str(error))
            return Failure("retry", str(error), billed=True)

    async def abort(self, url: str, call: Call | None) -> None:
        """Tell a server to stop generating; best effort."""
        if call is not None:
            with contextlib.suppress(Exception):
                await self.call_within(2.0, url, call)


def _no_connection(url: str, error: OSError) -> Failure:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Failure("fatal", f"{url}: certificate refused: {error.verify_message}")
    # All local ports are in TIME_WAIT: the server is well.
    kind: Kind = "throttle" if error.errno == errno.EADDRNOTAVAIL else "wait"
    return Failure(kind, f"can't connect: {' '.join((error.strerror or str(error)).split())[:200]}")
