"""HTTP/1.1 over TCP or TLS, at a fraction of a general client's cost: each reply goes to the request that it answers.

The client talks to a few servers with thousands of requests in flight. That needs no redirects and no cookies, and what
aiohttp spends on them is as much as everything else that a completion costs (benchmarks.client). Bytes are read by
httptools, the parser of uvicorn and Node.js.

Servers of our own are asked one request after another on connections that are kept. A server that says more than it
was asked loses its connection: what comes unasked would be taken for the next request's answer. Hosted APIs get a
connection for each request, since their answers hold nothing that tells whose they are.
"""

import asyncio
import contextlib
import errno
import ipaddress
import select
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from scripts.lib.client.proxies import Proxy, open_tunnel
from scripts.lib.engines.base import Call, Reply

# Below the 5 s after which uvicorn (SGLang, vLLM) and llama.cpp close an idle connection: reusing one
# that the server is just closing costs a request (aiohttp issues 850, 3609, 9138).
KEEPALIVE_SECONDS = 4.0
CONNECT_SECONDS = 30.0
_LOOKUP_SECONDS = 60.0  # that a host's addresses are believed
_RECEIVE_BYTES = 1 << 18
# Far above what any answer's ids take: a server that never stops would fill the memory before its deadline.
LARGEST_REPLY = 1 << 28
_LARGEST_HEAD = 1 << 16


class Broken(Exception):
    """The connection ended before the reply did. `answered`: after some of it had come.

    `kept`: it had been used before, so that the server may have closed it before it saw the request.
    """

    def __init__(self, reason: str, answered: bool) -> None:
        super().__init__(reason)
        self.answered, self.kept = answered, False


class TooLong(Broken):
    """The reply has more than `largest` bytes, and may have no end."""

    def __init__(self, largest: int) -> None:
        super().__init__(f"the answer is longer than {largest >> 20} MiB", True)


class Unreachable(Exception):
    """There is no connection to be had; `error` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Origin(NamedTuple):
    """Where requests go."""

    tls: bool
    host: str
    port: int


class Connections:
    """The connections of one event loop, kept by origin."""

    def __init__(
        self,
        headers: Mapping[str, str],
        largest_reply: int = LARGEST_REPLY,
        *,
        keep: bool = True,
        proxies: Mapping[str, Proxy] | None = None,
    ) -> None:
        """`headers` go with every call (authorization); a reply of more than `largest_reply` bytes is broken off.

        Without `keep` each request has a connection of its own. `proxies` by the scheme of the URL.
        """
        self._largest, self._keep, self._proxies = largest_reply, keep, proxies or {}
        self._headers = {"User-Agent": "drafter-corpus", **headers}
        self._idle: defaultdict[Origin, list[_Connection]] = defaultdict(list)
        self._open: set[_Connection] = set()
        self._heads: dict[tuple[str, str, str], tuple[Origin, bytes]] = {}
        self._lookups: dict[str, asyncio.Task] = {}
        self._found: dict[str, tuple[float, list[str]]] = {}  # when, and the addresses of a host
        self._tls: ssl.SSLContext | None = None
        # All connections read into the same bytes: whatever comes is parsed before anything else is read.
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))

    async def exchange(self, url: str, call: Call) -> Reply:
        """Send one call and wait for the whole reply, whose headers have names in lower case.

        Raises Broken or Unreachable. A caller that is cancelled leaves no connection behind.
        """
        origin, data = self._request(url, call)
        kept = self._kept(origin)
        connection = kept or await self._connect(origin)
        try:
            reply = await connection.send(data)
        except BaseException as error:
            connection.close()
            if isinstance(error, Broken):
                error.kept = kept is not None
            raise
        if self._keep and connection.reusable and connection.alive:
            connection.idle_since = time.monotonic()
            self._idle[origin].append(connection)
        else:
            connection.close()
        return reply

    def _request(self, url: str, call: Call) -> tuple[Origin, bytes]:
        """Where to send a call, and its bytes."""
        key = url, call.method, call.path
        if key not in self._heads:
            self._heads[key] = self._head(url, call)
        origin, head = self._heads[key]
        lines = [f"{name}: {value}\r\n" for name, value in call.headers.items()]
        body = call.body or b""
        return origin, b"%b%bContent-Length: %d\r\n\r\n%b" % (head, "".join(lines).encode("latin-1"), len(body), body)

    def _head(self, url: str, call: Call) -> tuple[Origin, bytes]:
        parts = urlsplit(url)
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        origin = Origin(tls, parts.hostname, parts.port or (443 if tls else 80))
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        host += f":{parts.port}" if parts.port else ""
        proxy = self._proxy(origin)
        # A proxy is told the whole URL, unless it only passes the bytes on.
        path = (f"http://{host}" if proxy and not tls else "") + parts.path.rstrip("/") + call.path
        lines = [f"{call.method} {path} HTTP/1.1", f"Host: {host}"]
        lines.append("Accept-Encoding: identity")  # without it any compression may come (RFC 9110, 12.5.3)
        lines += [] if self._keep else ["Connection: close"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if proxy and not tls:
            lines += [f"{name}: {value}" for name, value in proxy.headers.items()]
        return origin, "\r\n".join([*lines, ""]).encode("latin-1")

    def _proxy(self, origin: Origin) -> Proxy | None:
        proxy = self._proxies.get("https" if origin.tls else "http")
        return proxy if proxy and not proxy.bypassed(origin.host, origin.port) else None

    def _kept(self, origin: Origin) -> "_Connection | None":
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

    async def _connect(self, origin: Origin) -> "_Connection":
        """A new connection, through the proxy if there is one."""
        proxy = self._proxy(origin)
        if proxy is None:
            connection = await self._dial(origin)
        else:
            connection = await self._dial(Origin(proxy.tls, proxy.host, proxy.port))
            if origin.tls:
                connection = await self._tunnel(connection, proxy, origin)
        if not connection.alive or (not origin.tls and connection.unread()):
            connection.close()
            raise Unreachable(ConnectionResetError("the server spoke before it was asked, or closed at once"))
        return connection

    async def _dial(self, origin: Origin) -> "_Connection":
        """A connection to any address of the host, each of which gets its part of the time."""
        loop = asyncio.get_running_loop()
        problem = OSError(errno.ETIMEDOUT, f"no answer within {CONNECT_SECONDS:.0f} s")
        context, name = (self._context(), origin.host) if origin.tls else (None, None)
        addresses = await self._addresses(origin.host)
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                    transport, connection = await loop.create_connection(
                        self._new_connection, address, origin.port, ssl=context, server_hostname=name
                    )
                break
            except TimeoutError:
                continue
            except OSError as error:
                problem = error
                if isinstance(error, ssl.SSLError):
                    break
        else:
            self._found.pop(origin.host, None)
            raise Unreachable(problem)
        if isinstance(problem, ssl.SSLError):
            raise Unreachable(problem)
        if address != addresses[0]:  # the next connection needn't wait for those that don't answer
            addresses.remove(address)
            addresses.insert(0, address)
        # A peer that vanished without a word is noticed, sooner or later.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    async def _tunnel(self, near: "_Connection", proxy: Proxy, origin: Origin) -> "_Connection":
        """TLS to the server itself, over what `near` has opened to the proxy."""
        far = self._new_connection()
        try:
            if not near.alive:
                raise ConnectionResetError("the proxy closed the connection")
            async with asyncio.timeout(CONNECT_SECONDS):
                transport = await open_tunnel(near.hand_over(), proxy, origin.host, origin.port, far, self._context())
        except TimeoutError:
            raise Unreachable(OSError(errno.ETIMEDOUT, f"the proxy {proxy.host} does not connect")) from None
        except OSError as error:
            raise Unreachable(error) from None
        far.connection_made(transport)
        return far

    def _new_connection(self) -> "_Connection":
        return _Connection(asyncio.get_running_loop(), self._open, self._buffer, self._largest)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    async def _addresses(self, host: str) -> list[str]:
        """The IP addresses of a host, the one first that answered last.

        One lookup at a time: each takes a thread, and of these there are few. When names take long, hundreds of lookups
        would keep the journal's fsync waiting.
        """
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return [host]
        when, addresses = self._found.get(host, (0.0, []))
        if addresses and time.monotonic() - when < _LOOKUP_SECONDS:
            return addresses
        if host not in self._lookups:
            loop = asyncio.get_running_loop()
            self._lookups[host] = lookup = loop.create_task(loop.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            lookup.add_done_callback(self._looked_up)
            lookup.set_name(host)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = await asyncio.shield(self._lookups[host])
        except TimeoutError:
            raise Unreachable(OSError(errno.ETIMEDOUT, f"the address of {host} is not found")) from None
        except OSError as error:
            raise Unreachable(error) from None
        addresses = list(dict.fromkeys(address[0] for *_, address in found))
        self._found[host] = time.monotonic(), addresses
        return addresses

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
        self._early = False  # before the whole request was sent
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

    def hand_over(self) -> asyncio.Transport:
        """The bytes' way, for somebody else."""
        assert self._transport is not None
        self._everyone.discard(self)
        transport, self._transport = self._transport, None
        return transport

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
        if self.alive:
            self._everyone.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiting is None:  # a server that talks unasked, or more than it announced
            self.close()
            return
        assert self._transport is not None
        if not self._answered:
            self._answered, self._early = True, self._transport.get_write_buffer_size() > 0
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
        if self._early and self._status < 300:
            return Broken("an answer came before the request was sent", True)
        return Reply(self._status, self._headers, bytes(self._body))

    def _end(self, result: Reply | Broken) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.done():
            return
        if isinstance(result, Reply):
            waiting.set_result(result)
        else:
            waiting.set_exception(result)
