"""Moves bytes between adapters and endpoints: what each way of failing means.

Servers of our own (`http://`) are reached by `connections`; hosted APIs, with TLS and proxies, by one aiohttp session.
"""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Mapping
from types import TracebackType

import aiohttp

from scripts.lib.client.connections import (
    CONNECT_SECONDS,
    KEEPALIVE_SECONDS,
    LARGEST_REPLY,
    Broken,
    Connections,
    TooLong,
    Unreachable,
)
from scripts.lib.config.model import Engine
from scripts.lib.core import open_files
from scripts.lib.core.errors import UserError
from scripts.lib.engines.base import Call, Failure, Kind, Reply

# A connection that breaks sooner than this after the send was stale; later, the server broke it off.
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
    return {"Authorization": f"Bearer {key}"}


class HttpTransport:
    """The connections to all endpoints. An async context manager."""

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        through_proxy: bool = False,
        largest_reply: int = LARGEST_REPLY,
    ) -> None:
        """`headers` go with every call (authorization); `through_proxy` obeys HTTPS_PROXY of the environment.

        A reply of more than `largest_reply` bytes is broken off.
        """
        self._largest_reply = largest_reply
        self._headers = dict(headers or {})
        self._through_proxy = through_proxy
        self._session: aiohttp.ClientSession | None = None
        self._connections = Connections(self._headers, largest_reply)

    async def __aenter__(self) -> "HttpTransport":
        self._session = aiohttp.ClientSession(
            # No limit here: the pool bounds the requests in flight, and a hidden limit of 100 would cap them.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers=self._headers,
            trust_env=self._through_proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()
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
        plain = url.startswith("http://") and "@" not in url and not self._through_proxy
        try:
            return await (self._connections.exchange(url, call) if plain else self._request(url, call))
        except Unreachable as error:
            return _no_connection(error.error)
        except Broken as error:
            if error.answered:
                return Failure("retry", str(error), billed=True)
            return self._broken(begun, str(error))
        except aiohttp.ClientConnectorCertificateError as error:
            return Failure("fatal", f"{url}: certificate refused: {error.certificate_error}")
        except aiohttp.InvalidURL:
            return Failure("fatal", f"`{url}` is not a URL")
        except aiohttp.ClientConnectorError as error:
            return _no_connection(error.os_error)
        except aiohttp.ConnectionTimeoutError:
            return Failure("wait", f"can't connect: no answer within {CONNECT_SECONDS:.0f} s")
        except aiohttp.ServerDisconnectedError:
            return self._broken(begun, "the server closed the connection without an answer")
        except aiohttp.ClientPayloadError as error:
            return Failure("retry", f"the answer broke off: {_first_line(error)}", billed=True)
        except (aiohttp.ClientOSError, ConnectionError) as error:
            return self._broken(begun, f"the connection broke: {_first_line(error)}")
        except aiohttp.ClientError as error:
            return Failure("retry", f"{type(error).__name__}: {_first_line(error)}", billed=True)

    async def _request(self, url: str, call: Call) -> Reply:
        assert self._session is not None
        async with self._session.request(
            call.method, url + call.path, data=call.body, headers=call.headers, allow_redirects=False
        ) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > self._largest_reply:
                    raise TooLong(self._largest_reply)
            return Reply(response.status, headers, bytes(body))

    def _broken(self, begun: float, reason: str) -> Failure:
        if time.monotonic() - begun < _STALE_SECONDS:
            return Failure("free", reason)
        return Failure("retry", reason, billed=True)

    async def abort(self, url: str, call: Call | None) -> None:
        """Tell a server to stop generating; best effort."""
        if call is not None:
            with contextlib.suppress(Exception):
                await self.call_within(2.0, url, call)


def _no_connection(error: OSError) -> Failure:
    # All local ports are in TIME_WAIT: the server is well.
    kind: Kind = "throttle" if error.errno == errno.EADDRNOTAVAIL else "wait"
    return Failure(kind, f"can't connect: {error.strerror or _first_line(error)}")


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
