"""The client's own HTTP on real sockets: servers that speak it well, badly, or not at all."""

import asyncio
import base64
import contextlib
import gzip
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from scripts.lib.client import connections
from scripts.lib.client.connections import Broken, Connections, Unreachable
from scripts.lib.client.proxies import Proxy, proxies_of_environment
from scripts.lib.core.errors import UserError
from scripts.lib.engines.base import Call, Reply, post
from tests.certificates import certificate, server_context

CALL = post("/generate", {"input_ids": [1, 2]})
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Handler = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.asked = 0

    async def mine(self) -> bytes:
        """The reply to the next request: it holds the request's body."""
        _, body = await self.request()
        self.asked += 1
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def request(self) -> tuple[bytes, bytes]:
        """(head, body) of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()


@contextlib.asynccontextmanager
async def serving(
    handler: Handler, host: str = "127.0.0.1", *, tls: bool = False, **options: Any
) -> AsyncIterator[tuple[str, Connections, list[Peer]]]:
    """A server that gives each connection to `handler` and then closes it: (URL, client, the connections)."""
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(Peer(reader, writer))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(peers[-1])
        writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=server_context() if tls else None)
    port = server.sockets[0].getsockname()[1]
    client = Connections({"Authorization": "Bearer k"}, **options)
    try:
        yield (
            f"http://[{host}]:{port}/base/" if ":" in host else f"http{'s' if tls else ''}://{host}:{port}",
            client,
            peers,
        )
    finally:
        await client.close()
        server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def one_reply(*pieces: bytes) -> Reply:
    """What the client makes of these bytes, after which the server closes."""
    replies = []

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)

    async def test() -> None:
        async with serving(handle) as (url, client, _):
            replies.append(await client.exchange(url, CALL))

    run(test)
    return replies[0]


@pytest.mark.parametrize(
    "pieces",
    [
        [WHOLE],
        [WHOLE[:9], WHOLE[9:30], WHOLE[30:-1], WHOLE[-1:]],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE],
        [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{", b"}"],  # ends with the connection
        [b"HTTP/1.0 200 OK\r\n\r\n{}"],
    ],
    ids=["whole", "in pieces", "chunked", "after a 100", "until closed", "HTTP/1.0"],
)
def test_replies_of_every_framing(pieces: list[bytes]) -> None:
    reply = one_reply(*pieces)
    assert (reply.status, reply.body) == (200, b"{}")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP"])
def test_a_reply_that_is_compressed_though_nobody_asked_for_it_is_read(coding: str) -> None:
    body = gzip.compress(b"{}") if coding.lower() == "gzip" else zlib.compress(b"{}")
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reply = one_reply(head, body)
    assert (reply.body, "content-encoding" in reply.headers) == (b"{}", False)


def test_a_reply_in_an_unknown_compression_says_so() -> None:
    reply = one_reply(b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\n\x0b\x00")
    assert (reply.body, reply.headers["content-encoding"]) == (b"\x0b\x00", "br")


def test_status_and_headers_of_an_error() -> None:
    reply = one_reply(b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n")
    assert (reply.status, reply.headers["retry-after"], reply.body) == (429, "7", b"")


def test_a_large_reply() -> None:
    body = bytes(range(256)) * 20_000
    assert one_reply(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body).body == body


@pytest.mark.parametrize(
    ("pieces", "answered"),
    [
        ([], False),
        ([b"HTTP/1.1 20"], True),
        ([WHOLE[:-1]], True),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"], True),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], True),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n"], True),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"], True),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n\x00"], True),
    ],
    ids=[
        *("nothing", "half a head", "half a body", "half a chunk", "not HTTP", "no length", "two lengths"),
        "another protocol",
    ],
)
def test_what_is_no_reply_breaks(pieces: list[bytes], answered: bool, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Broken) as caught:
        one_reply(*pieces)
    assert caught.value.answered is answered
    assert not caplog.records


_OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "piece", "says"),
    [
        (_OK + b"\r\n", b"x" * 65536, "longer than 1 MiB"),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000, "longer than 1 MiB"),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 10_000, "longer than 1 MiB"),
        (_OK + b"X: ", b"x" * 65536, "the head of the answer has no end"),
        (_OK, b"X: y\r\n" * 10_000, "the head of the answer has no end"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000, "the head of the answer has no end"),
    ],
    ids=["body", "chunks", "trailers", "header", "headers", "continues"],
)
def test_a_reply_without_end_is_broken_off(head: bytes, piece: bytes, says: str) -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(head)
        while True:
            await peer.send(piece)

    async def test() -> None:
        async with serving(handle) as (url, _, _):
            client = Connections({}, largest_reply=1 << 20)
            with pytest.raises(Broken, match=says):
                await client.exchange(url, CALL)
            await client.close()
            assert not client._open

    run(test)


def test_what_is_sent() -> None:
    async def handle(peer: Peer) -> None:
        head, body = await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b%b" % (len(head + body), head, body))
        head, body = await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b%b" % (len(head + body), head, body))

    async def test() -> None:
        async with serving(handle, "::1") as (url, client, peers):
            port = int(url.removesuffix("/base/").rpartition(":")[2])
            sent = (await client.exchange(url, CALL)).body
            lines = sent.split(b"\r\n")
            assert lines[0] == b"POST /base/generate HTTP/1.1"
            assert set(lines[1:7]) == {
                b"User-Agent: drafter-corpus",
                b"Accept-Encoding: identity",
                b"Host: [::1]:%d" % port,
                b"Authorization: Bearer k",
                b"Content-Type: application/json",
                b"Content-Length: 19",
            }
            assert lines[7:] == [b"", b'{"input_ids":[1,2]}']
            assert (await client.exchange(url, Call("GET", "/health"))).body.startswith(
                b"GET /base/health HTTP/1.1\r\n"
            )
            assert len(peers) == 1

    run(test)


@pytest.mark.parametrize("extra", [WHOLE, b"HTTP/1.1 200 OK\r\n", b"\x00"], ids=["reply", "half a reply", "noise"])
@pytest.mark.parametrize("later", [False, True], ids=["with the reply", "after it"])
def test_what_nobody_asked_for_reaches_no_request(extra: bytes, later: bool) -> None:
    """An answer must never be another prompt's: a connection that says more than it was asked is given up."""

    async def handle(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            mine = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            await peer.send(*([mine, extra] if later else [mine + extra]))

    async def test() -> None:
        async with serving(handle) as (url, client, peers):
            for number in range(5):
                call = post("/generate", {"input_ids": [number]})
                assert (await client.exchange(url, call)).body == call.body
                while later and any(connection.alive for connection in client._open):
                    await asyncio.sleep(0)  # until the extra bytes have come
            assert len(peers) == 5

    run(test)


def test_what_the_busy_event_loop_has_not_read_yet_reaches_no_request() -> None:
    """A second reply, or the connection's end, may lie in the kernel when the next request is to go out."""
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"

    def asked() -> socket.socket:
        peer = server.accept()[0]
        peer.recv(65536)
        return peer

    async def test() -> None:
        loop, client = asyncio.get_running_loop(), Connections({})
        for extra in (WHOLE.replace(b"{}", b"!!"), b""):
            first = asyncio.create_task(client.exchange(url, CALL))
            peer = await loop.run_in_executor(None, asked)
            peer.sendall(WHOLE)
            assert (await first).body == b"{}"
            # All in one turn of the event loop, as when it is busy with other answers.
            peer.sendall(extra)
            peer.close()
            second = asyncio.create_task(client.exchange(url, CALL))
            peer = await loop.run_in_executor(None, asked)
            peer.sendall(WHOLE)
            assert (await second).body == b"{}"
            peer.close()
            while client._open:
                await asyncio.sleep(0)
        await client.close()

    with server:
        server.settimeout(10)
        run(test)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
def test_a_connection_that_the_server_will_close_is_not_used_again(head: bytes) -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(head + b"Content-Length: 2\r\n\r\n{}")
        await peer.reader.read()  # leaves the closing to the client

    async def test() -> None:
        async with serving(handle) as (url, client, peers):
            for _ in range(3):
                await client.exchange(url, CALL)
            assert len(peers) == 3

    run(test)


def test_connections_that_were_idle_too_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(WHOLE)

    async def test() -> None:
        now = [100.0]
        monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
        async with serving(handle) as (url, client, peers):
            await asyncio.gather(*(client.exchange(url, CALL) for _ in range(3)))
            now[0] += connections.KEEPALIVE_SECONDS - 0.1
            await client.exchange(url, CALL)  # young again, the others not
            assert len(peers) == 3
            now[0] += 0.2
            await asyncio.gather(*(client.exchange(url, CALL) for _ in range(2)))
            assert len(peers) == 4
            await asyncio.sleep(0)
            assert len(client._open) == 2

    run(test)


def test_a_call_that_is_given_up_takes_its_connection_along() -> None:
    """What is still to come on it would be the next request's answer."""

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.reader.read()  # until the client goes

    async def test() -> None:
        async with serving(handle) as (url, client, peers):
            call = asyncio.create_task(client.exchange(url, CALL))
            while not peers:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0)
            assert not client._open
            assert not any(client._idle.values())

    run(test)


def test_nobody_there() -> None:
    async def test() -> None:
        client = Connections({})
        with pytest.raises(Unreachable) as caught:
            await client.exchange("http://127.0.0.1:1", CALL)
        assert isinstance(caught.value.error, ConnectionRefusedError)
        with pytest.raises(Unreachable):
            await client.exchange("http://no-such-host.invalid:80", CALL)

    run(test)


ADDRESSES = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]  # nothing listens on the first


def test_a_host_that_many_wait_for_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup takes a thread, and the journal's fsync needs one as well."""
    asked: list[str] = []
    go_on = threading.Event()

    def lookup(host: str, *arguments: Any, **named: Any) -> list[tuple]:
        asked.append(host)
        go_on.wait(10)
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in ADDRESSES]

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(WHOLE)

    async def test() -> None:
        async with serving(handle) as (url, client, peers):
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            calls = [client.exchange(url.replace("127.0.0.1", "farm.example"), CALL) for _ in range(50)]
            together = asyncio.gather(*calls)
            while not asked:
                await asyncio.sleep(0)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "a thread is free"), 5)
            go_on.set()
            assert {reply.body for reply in await together} == {b"{}"}
            assert (asked, len(peers)) == (["farm.example"], 50)

    run(test)


# --- replies that come early, late, twice, merged: none of them reaches another request ---


async def doubled(peer: Peer) -> None:
    while True:
        mine = await peer.mine()
        await peer.send(mine, mine)


async def doubled_later(peer: Peer) -> None:
    while True:
        mine = await peer.mine()
        await peer.send(mine)
        await asyncio.sleep(0.003)
        await peer.send(mine)


async def merged(peer: Peer) -> None:
    while True:
        mine = await peer.mine()
        await peer.send(mine + WHOLE + mine)


async def late(peer: Peer) -> None:
    """The second request's reply comes after that of the first one, again."""
    first = await peer.mine()
    await peer.send(first)
    await peer.mine()
    await peer.send(first)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("handler", [doubled, doubled_later, merged, late])
def test_each_reply_of_a_hosted_api_goes_to_its_own_request(
    handler: Handler, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply too many on a kept connection shifted 59 of 60 answers."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate()[0]))

    async def test() -> None:
        async with serving(handler, tls=tls, keep=False) as (url, client, peers):
            for number in range(20):
                call = post("/generate", {"input_ids": [number]})
                assert (await client.exchange(url, call)).body == call.body
            assert [peer.asked for peer in peers] == [1] * 20

    run(test)


def test_a_server_that_speaks_before_it_is_asked_answers_nobody() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"

    async def test() -> None:
        loop, client = asyncio.get_running_loop(), Connections({}, keep=False)
        dial = client._dial

        async def dial_and_hear(origin: connections.Origin) -> Any:
            connection = await dial(origin)
            peer = await loop.run_in_executor(None, lambda: server.accept()[0])
            peer.sendall(WHOLE)
            return connection

        client._dial = dial_and_hear  # type: ignore[method-assign]
        with pytest.raises(Unreachable, match="spoke before it was asked"):
            await client.exchange(url, CALL)
        await client.close()

    with server:
        server.settimeout(10)
        run(test)


def test_an_answer_that_comes_before_the_whole_request_was_sent_is_none() -> None:
    """An error may come early (the request is too large), an answer can't."""

    def early(status: bytes) -> Handler:
        async def handle(peer: Peer) -> None:
            await peer.reader.readuntil(b"\r\n\r\n")
            await peer.send(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\n{}" % status)
            await peer.reader.read()

        return handle

    large = post("/generate", {"input_ids": list(range(5_000_000))})  # more than the sockets' buffers hold

    async def test() -> None:
        async with serving(early(b"200 OK")) as (url, client, _):
            with pytest.raises(Broken, match="before the request was sent"):
                await client.exchange(url, large)
        async with serving(early(b"413 Too Large")) as (url, client, _):
            assert (await client.exchange(url, large)).status == 413

    run(test)


# --- TLS and proxies ---


def test_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept connections as well; a certificate that nobody vouches for is refused."""

    async def handle(peer: Peer) -> None:
        while True:
            await peer.send(await peer.mine())

    async def test() -> None:
        async with serving(handle, "localhost", tls=True) as (url, client, peers):
            with pytest.raises(Unreachable) as caught:
                await client.exchange(url, CALL)
            assert "self-signed" in str(caught.value)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate()[0]))
            trusting = Connections({})
            before = len(peers)
            for _ in range(5):
                assert (await trusting.exchange(url, CALL)).body == CALL.body
            assert len(peers) - before <= 2
            await trusting.close()

    run(test)


class ProxyServer:
    """Passes bytes on, as a proxy of a company does; remembers what it was asked."""

    def __init__(self, status: bytes = b"200 Connection established") -> None:
        self.status, self.heads = status, []

    async def __call__(self, peer: Peer) -> None:
        head = await peer.reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.decode())
        method, target = head.split(b" ")[:2]
        if method != b"CONNECT":
            await peer.send(WHOLE)
            return
        await peer.send(b"HTTP/1.1 %b\r\n\r\n" % self.status)
        if not self.status.startswith(b"200"):
            return
        host, _, port = target.decode().rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(peer.reader, writer), pump(reader, peer.writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("proxied_by", ["http", "https"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_through_a_proxy(tls: bool, proxied_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate()[0]))
    proxy = ProxyServer()

    async def handle(peer: Peer) -> None:
        await peer.send(await peer.mine())

    async def test() -> None:
        async with serving(proxy, "localhost", tls=proxied_by == "https") as (address, _, _):
            monkeypatch.setenv("http_proxy", address.replace("://", "://anna:p%40ss@"))
            monkeypatch.setenv("https_proxy", address.replace("://", "://anna:p%40ss@"))
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            options = {"keep": False, "proxies": proxies_of_environment()}
            async with serving(handle, "localhost", tls=tls, **options) as (url, client, _):
                assert (await client.exchange(url, CALL)).body == (CALL.body if tls else b"{}")
            [head] = proxy.heads
            secret = base64.b64encode(b"anna:p@ss").decode()
            assert f"Proxy-Authorization: Basic {secret}\r\n" in head
            host = url.rpartition("/")[2]
            assert head.startswith(f"CONNECT {host} HTTP/1.1\r\n" if tls else f"POST {url}/generate HTTP/1.1\r\n")
            assert ("Bearer k" in head) is not tls  # what is in the tunnel is for the server only
            async with serving(handle, **options) as (url, client, _):
                assert (await client.exchange(url, CALL)).body == CALL.body
            assert len(proxy.heads) == 1

    run(test)


def test_a_proxy_that_refuses_is_named_without_its_password() -> None:
    async def test() -> None:
        async with serving(ProxyServer(b"407 Proxy Authentication Required")) as (address, _, _):
            port = int(address.rpartition(":")[2])
            client = Connections({}, keep=False, proxies={"https": Proxy(False, "127.0.0.1", port)})
            with pytest.raises(Unreachable, match=r"the proxy 127.0.0.1 refuses: 407 Proxy Auth"):
                await client.exchange("https://api.example", CALL)
            await client.close()

    run(test)


@pytest.mark.parametrize("value", ["socks5://anna:secret@10.0.0.1:1080", "http://anna:secret@:x", "http://"])
def test_a_proxy_that_is_none_stops_the_job(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(UserError, match="https_proxy: its value is no address") as caught:
        proxies_of_environment()
    assert "secret" not in str(caught.value)
