"""HTTP/1.1 over plain TCP to servers of our own, at a third of a general client's cost.

The client talks to a few servers with thousands of requests in flight, one after another on connections that are kept.
That needs no redirects, cookies, compression or proxies, and what aiohttp spends on them is as much as everything else
that a completion costs (benchmarks.client). Bytes are read by httptools, the parser of uvicorn and Node.js.
"""

import asyncio
import contextlib
import errno
import ipaddress
import select
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from urllib.parse import urlsplit

import httptools

from scripts.lib.engines.base import Call, Reply

# Below the 5 s after which uvicorn (SGLang, vLLM) and llama.cpp close an idle connection: reusing one
# that the server is just closing costs a request (aiohttp issues 850, 3609, 9138).
KEEPALIVE_SECONDS = 4.0
CONNECT_SECONDS = 30.0
_RECEIVE_BYTES = 1 << 18
# Far above what any answer's ids take: a server that never stops would fill the memory before its deadline.
LARGEST_REPLY = 1 << 28
_LARGEST_HEAD = 1 << 16


class Broken(Exception):
    """The connection ended before the reply did. `answered`: after some of it had come."""

    def __init__(self, reason: str, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered


class TooLong(Broken):
    """The reply has more than `largest` bytes, and may have no end."""

    def __init__(self, largest: int) -> None:
        super().__init__(f"the answer is longer than {largest >> 20} MiB", True)


class Unreachable(Exception):
    """There is no connection to be had; `error` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Connections:
    """The connections of one event loop, kept by (host, port)."""

    def __init__(self, headers: Mapping[str, str], largest_reply: int = LARGEST_REPLY) -> None:
        """`headers` go with every call (authorization); a reply of more than `largest_reply` bytes is broken off."""
        self._largest = largest_reply
        self._headers = dict(headers)
        self._idle: defaultdict[tuple[str, int], list[_Connection]] = defaultdict(list)
        self._open: set[_Connection] = set()
        self._heads: dict[tuple[str, str, str], tuple[tuple[str, int], bytes]] = {}
        self._lookups: dict[str, asyncio.Task] = {}
        # All connections read into the same bytes: whatever comes is parsed before anything else is read.
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))

    async def exchange(self, url: str, call: Call) -> Reply:
        """Send one call and wait for the whole reply, whose headers have names in lower case.

        Raises Broken or Unreachable. A caller that is cancelled leaves no connection behind.
        """
        origin, data = self._request(url, call)
        connection = self._kept(origin) or await self._connect(origin)
        try:
            reply = await connection.send(data)
        except BaseException:
            connection.close()
            raise
        if connection.reusable and connection.alive:
            connection.idle_since = time.monotonic()
            self._idle[origin].append(connection)
        else:
            connection.close()
        return reply

    def _request(self, url: str, call: Call) -> tuple[tuple[str, int], bytes]:
        """Where to send a call, and its bytes."""
        key = url, call.method, call.path
        if key not in self._heads:
            parts = urlsplit(url)
            assert parts.hostname is not None
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            port = parts.port or 80
            lines = [f"{call.method} {parts.path.rstrip('/')}{call.path} HTTP/1.1", f"Host: {host}:{port}"]
            lines.append("Accept-Encoding: identity")  # without it any compression may come (RFC 9110, 12.5.3)
            lines += [f"{name}: {value}" for name, value in self._headers.items()]
            self._heads[key] = (parts.hostname, port), "\r\n".join([*lines, ""]).encode("latin-1")
        origin, head = self._heads[key]
        lines = [f"{name}: {value}\r\n" for name, value in call.headers.items()]
        body = call.body or b""
        return origin, b"%b%bContent-Length: %d\r\n\r\n%b" % (head, "".join(lines).encode("latin-1"), len(body), body)

    def _kept(self, origin: tuple[str, int]) -> "_Connection | None":
        """A connection that was used a moment ago."""
        idle = self._idle[origin]
        oldest = time.monotonic() - KEEPALIVE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.idle_since < oldest:
                for stale in (connection, *idle):  # the others have waited even longer
                    stale.close()
                idle.clear()
            elif connection.alive and not connection.unread():
                return connection
            else:
                connection.close()
        return None

    async def _connect(self, origin: tuple[str, int]) -> "_Connection":
        """A new connection to any address of the host, each of which gets its part of the time."""
        loop = asyncio.get_running_loop()
        problem = OSError(errno.ETIMEDOUT, f"no answer within {CONNECT_SECONDS:.0f} s")
        host, port = origin
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                addresses = await self._addresses(host)
        except TimeoutError:
            raise Unreachable(OSError(errno.ETIMEDOUT, f"the address of {host} is not found")) from None
        except OSError as error:
            raise Unreachable(error) from None
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                    transport, connection = await loop.create_connection(
                        lambda: _Connection(loop, self._open, self._buffer, self._largest), address, port
                    )
                break
            except TimeoutError:
                continue
            except OSError as error:
                problem = error
        else:
            raise Unreachable(problem)
        # A peer that vanished without a word is noticed, sooner or later.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    async def _addresses(self, host: str) -> list[str]:
        """The IP addresses of a host.

        One lookup at a time: each takes a thread, and of these there are few. When names take long, hundreds of lookups
        would keep the journal's fsync waiting.
        """
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return [host]
        if host not in self._lookups:
            loop = asyncio.get_running_loop()
            self._lookups[host] = lookup = loop.create_task(loop.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            lookup.add_done_callback(self._looked_up)
            lookup.set_name(host)
        return [address[0] for *_, address in await asyncio.shield(self._lookups[host])]

    def _looked_up(self, lookup: asyncio.Task) -> None:
        del self._lookups[lookup.get_name()]
        if not lookup.cancelled():
            lookup.exception()  # seen, though everyone who waited may have gone

    async def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # the loop closes sockets in its next turn


class _Connection(asyncio.BufferedProtocol):
    """One connection: at most one request on its way."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, everyone: set["_Connection"], buffer: memoryview, largest: int
    ) -> None:
        self._loop, self._everyone, self._buffer, self._largest = loop, everyone, buffer, largest
        self._received = 0  # bytes since the request was sent
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._answered = False  # some of the reply has come
        self._arrivals = select.poll()
        self._parser = httptools.HttpResponseParser(self)
        self.alive = True
        self.reusable = False
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def send(self, data: bytes) -> asyncio.Future[Reply]:
        """Send a request; the future has its reply, or raises Broken."""
        assert self._transport is not None
        self.reusable = self._answered = False
        self._received = 0
        self._waiting = self._loop.create_future()
        self._transport.write(data)
        return self._waiting

    def unread(self) -> bool:
        """Whether something has come, or the end, that the busy event loop has not come to yet."""
        return bool(self._arrivals.poll(0))

    def close(self) -> None:
        """Close at once: nobody waits for what may still come."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    # --- of the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._arrivals.register(transport.get_extra_info("socket"), select.POLLIN)
        self._everyone.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiting is None:  # a server that talks unasked, or more than it announced
            self.close()
            return
        self._answered = True
        self._received += nbytes
        if self._received > self._largest:
            self._end(TooLong(self._largest))
            self.close()
            return
        if not self._status and self._received > _LARGEST_HEAD + nbytes:
            self._end(Broken("the head of the answer has no end", True))
            self.close()
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._end(Broken(f"the answer is no HTTP: {error}", True))
            self.close()
        except httptools.HttpParserUpgrade:
            self._end(Broken("the server answers with another protocol than HTTP", True))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self._everyone.discard(self)
        if self._status and error is None and not self._headers.keys() & {"content-length", "transfer-encoding"}:
            self._end(self._reply())  # a body that ends with the connection
        elif self._answered:
            self._end(Broken("the answer broke off" + (f": {error}" if error else ""), True))
        elif error is not None:
            self._end(Broken(f"the connection broke: {error}", False))
        else:
            self._end(Broken("the server closed the connection without an answer", False))

    # --- of the parser ---

    def on_message_begin(self) -> None:
        if self._waiting is None:  # one reply more than was asked for: the next request must not get it
            self.alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # what comes after the body (RFC 9110, 6.5) nobody needs
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if 100 <= self._status < 200:
            self._begin()  # not the answer yet
            return
        self.reusable = self._parser.should_keep_alive()
        self._end(self._reply())
        self._begin()

    def _reply(self) -> Reply | Broken:
        coding = self._headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            return Broken(f"the answer is compressed ({coding}), which nobody asked for", True)
        return Reply(self._status, self._headers, bytes(self._body))

    def _end(self, result: Reply | Broken) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.done():
            return
        if isinstance(result, Reply):
            waiting.set_result(result)
        else:
            waiting.set_exception(result)
