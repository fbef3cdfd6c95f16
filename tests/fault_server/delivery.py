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


SWAPS: web.AppKey[list[tuple[Wire, asyncio.Future[Wire]]]] = web.AppKey("swaps", list)


async def doubled(request: web.Request, reply: Wire, seconds: float) -> web.StreamResponse:
    """The whole reply, and a copy of it on the same connection a moment later."""
    response = await send(request, reply)
    head = [f"HTTP/1.1 {reply.status} OK", f"Content-Length: {len(reply.body)}"]
    head += [f"{name}: {value}" for name, value in reply.headers.items()]
    transport, copy = request.transport, "\r\n".join([*head, "", ""]).encode() + reply.body

    def again() -> None:
        if transport is not None and not transport.is_closing():
            transport.write(copy)

    asyncio.get_running_loop().call_later(seconds, again)
    return response


async def swapped(request: web.Request, reply: Wire) -> web.StreamResponse:
    """The reply to another request that is under way, which gets this one; the right one when there is none."""
    waiting = request.app[SWAPS]
    while waiting:
        other, answer = waiting.pop()
        if not answer.done():
            answer.set_result(reply)
            return await send(request, other)
    answer = asyncio.get_running_loop().create_future()
    waiting.append((reply, answer))
    try:
        return await send(request, await asyncio.wait_for(answer, 0.3))
    except TimeoutError:
        return await send(request, reply)


async def deliver(request: web.Request, reply: Wire) -> web.StreamResponse:
    """Bring the bytes onto the wire as `reply.delivery` says. Raises ConnectionResetError when it breaks off."""
    if reply.delivery == "whole":
        return await send(request, reply)
    if reply.delivery in ("doubled", "doubled_late"):
        return await doubled(request, reply, 0.03 if reply.delivery == "doubled_late" else 0.0)
    if reply.delivery == "swapped":
        return await swapped(request, reply)
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
