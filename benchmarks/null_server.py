"""An HTTP server that costs almost nothing: one canned SGLang answer for every request, after a fixed time.

It parses no more of HTTP than it must, so that one core serves what a client on another core can ask.
"""

import argparse
import asyncio
import random

import orjson

PAGES = {
    b"/v1/models": {"data": [{"id": "null", "max_model_len": 1_000_000}]},
    b"/server_info": {"version": "0"},
    b"/metrics": {},
}


CANARY = b'"max_new_tokens":48,'  # an answer longer than it asks for would be refused


def reply(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer(tokens: int) -> bytes:
    """An SGLang `/generate` body with so many ids. It doesn't count the prompt: it hasn't read it."""
    dice = random.Random(0)
    ids = [*(dice.randrange(1_000, 20_000) for _ in range(tokens - 1)), 2]
    meta = {"id": "x", "finish_reason": {"type": "stop", "matched": 2}, "completion_tokens": tokens}
    return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


class Null(asyncio.Protocol):
    """One connection."""

    def __init__(self, pages: dict[bytes, bytes], answer: bytes, delay: float) -> None:
        self.pages, self.answer, self.delay = pages, answer, delay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            length = 0
            at = head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            page = self.pages.get(CANARY if CANARY in body else head.split(b" ", 2)[1])
            if page is not None:
                self.transport.write(page)  # type: ignore[attr-defined]
            elif self.delay:
                asyncio.get_running_loop().call_later(self.delay, self.transport.write, self.answer)  # type: ignore[attr-defined]
            else:
                self.transport.write(self.answer)  # type: ignore[attr-defined]


async def serve(tokens: int, delay: float) -> None:
    pages = {path: reply(orjson.dumps(page)) for path, page in PAGES.items()}
    pages[CANARY] = reply(answer(24))
    canned = reply(answer(tokens))
    server = await asyncio.get_running_loop().create_server(
        lambda: Null(pages, canned, delay), "127.0.0.1", 0, backlog=4096
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until the answer comes")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.tokens, arguments.delay))
