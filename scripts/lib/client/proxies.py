"""Proxies of the environment (HTTPS_PROXY, HTTP_PROXY, NO_PROXY), as curl and Python's own urllib read them."""

import asyncio
import base64
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from scripts.lib.core.errors import UserError
from scripts.lib.core.secrets import keep_secret

_LARGEST_HEAD = 1 << 16


@dataclass(frozen=True)
class Proxy:
    """One proxy. `headers` say who asks it."""

    tls: bool
    host: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def bypassed(self, host: str, port: int) -> bool:
        """Whether NO_PROXY names the host."""
        return bool(urllib.request.proxy_bypass(f"{host}:{port}"))


def proxies_of_environment() -> dict[str, Proxy]:
    """The proxies by the scheme of the URLs that they are for. Raises UserError when one can't be used."""
    named = urllib.request.getproxies_environment()
    return {scheme: _parsed(scheme, named[scheme]) for scheme in ("http", "https") if named.get(scheme)}


def _parsed(scheme: str, text: str) -> Proxy:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UserError(f"{scheme}_proxy: its value is no address of an HTTP proxy such as http://10.0.0.5:3128")
    tls = parts.scheme == "https"
    headers = {}
    if parts.username:
        keep_secret(unquote(parts.password or ""))
        who = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        basic = base64.b64encode(who).decode()
        keep_secret(basic)
        headers["Proxy-Authorization"] = f"Basic {basic}"
    return Proxy(tls, parts.hostname, port or (443 if tls else 80), headers)


async def open_tunnel(
    transport: asyncio.Transport,
    proxy: Proxy,
    host: str,
    port: int,
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext,
) -> asyncio.Transport:
    """Have the proxy pass bytes on to a server, and speak TLS with it for `protocol`. Raises OSError."""
    loop = asyncio.get_running_loop()
    answer = _TunnelAnswer(loop)
    transport.set_protocol(answer)
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}", *(f"{key}: {value}" for key, value in proxy.headers.items())]
    transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    try:
        status = (await answer.head).split(b"\r\n")[0].decode("latin-1").split(" ", 2)
        if status[1:2] != ["200"]:
            raise OSError(f"the proxy {proxy.host} refuses: {' '.join(status[1:])[:100]}")
        secured = await loop.start_tls(transport, protocol, context, server_hostname=host)
    except BaseException:
        transport.abort()
        raise
    if secured is None:
        raise ConnectionResetError("the proxy closed the connection")
    return secured


class _TunnelAnswer(asyncio.Protocol):
    """Reads what a proxy says before it passes bytes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.head: asyncio.Future[bytes] = loop.create_future()
        self._read = bytearray()

    def data_received(self, data: bytes) -> None:
        self._read += data
        if self.head.done():
            return
        if b"\r\n\r\n" in self._read:
            self.head.set_result(bytes(self._read))
        elif len(self._read) > _LARGEST_HEAD:
            self.head.set_exception(OSError("the proxy's answer has no end"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.head.done():
            self.head.set_exception(ConnectionResetError("the proxy closed the connection"))
