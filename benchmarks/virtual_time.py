"""An asyncio event loop whose clock jumps to the next timer as soon as nothing is left to do.

Code that takes its time from the loop runs unchanged, hours of it in seconds. Threads are not: what is sent to an
executor runs at once, in the loop, and takes no time.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """A selector that doesn't wait: it tells how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that no timer will bring")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use with `asyncio.Runner(loop_factory=VirtualLoop)`."""

    def __init__(self) -> None:
        self._virtual = _Jumping()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, function: Callable, *arguments: Any) -> asyncio.Future:  # type: ignore[override]
        result = self.create_future()
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)
        return result

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""
