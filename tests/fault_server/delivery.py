"""How a reply's bytes reach the client, or don't."""

import asyncio
import socket
import struct

from aiohttp import web

from tests.fault_server.shapes import Wire


def gone(request: web.Request) -> bool:
    """Whether the client has left."""
    return request.transport is None or request.transport.is_closing()


async def silence(request: web.Request) -> None:
    """Keep the connection and say nothing until the client leaves."""
    while not gone(request):
        await asyncio.sleep(0.05)
    raise ConnectionResetError("the client left")


async def send(request: web.Request, reply: Wire) -> web.StreamResponse:
    """The whole reply."""
    response = web.Response(body=reply.body, status=reply.status, headers=reply.headers)
    await response.prepare(request)
    await response.write_eof()
    return response


async def deliver(request: web.Request, reply: Wire) -> web.StreamResponse:
    """Bring the bytes onto the wire as `reply.delivery` says. Raises ConnectionResetError when it breaks off."""
    if reply.delivery == "whole":
        return await send(request, reply)
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client left")
    if reply.delivery == "drop":
        transport.close()
        raise ConnectionResetError("closed without an answer")
    if reply.delivery in ("silence", "late"):
        await silence(request)
    response = web.StreamResponse(status=reply.status, headers=reply.headers)
    if reply.delivery == "short":
        response.content_length = len(reply.body)
    else:
        response.enable_chunked_encoding()
    await response.prepare(request)
    if reply.delivery == "split":
        for start in range(0, len(reply.body), 7):
            await response.write(reply.body[start : start + 7])
        await response.write_eof()
        return response
    await response.write(reply.body[: len(reply.body) // 2])
    if reply.delivery == "stall":
        await silence(request)
    if reply.delivery == "reset":
        await asyncio.sleep(0.01)  # lets the half body reach the client first
        # Linger 0: the socket is closed with RST instead of FIN.
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
    raise ConnectionResetError("broken off")
