"""How a job of many tasks ends before its time: by a signal, or by the first thing that goes wrong."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class Stopped(Exception):
    """A signal asked the job to end."""

    def __init__(self, number: int) -> None:
        self.number = number


async def first_trouble(watched: list[asyncio.Future], workers: list[asyncio.Task]) -> None:
    """Wait until all workers are done; raise what any of them or of the watched raises before."""
    everyone = asyncio.gather(*workers)
    try:
        await asyncio.wait([everyone, *watched], return_when=asyncio.FIRST_COMPLETED)
        for future in watched:
            if future.done():
                future.result()
        await everyone
    finally:
        everyone.cancel()
        with contextlib.suppress(BaseException):
            await everyone


@contextlib.contextmanager
def signals(stop: asyncio.Future[None]) -> Iterator[None]:
    """SIGTERM and SIGINT end the job in order: what has arrived is journalled."""
    loop = asyncio.get_running_loop()

    def ask(number: int) -> None:
        if not stop.done():
            stop.set_exception(Stopped(number))

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if not stop.done():
            stop.cancel()
