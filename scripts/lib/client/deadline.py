"""When a request in flight is broken off."""

import asyncio
from types import TracebackType


class Deadline:
    """Breaks off the block that it is entered for: when its time is up, or before, when its endpoint is taken out.

    As asyncio.timeout does, but without a timer for each of thousands of requests: somebody looks at all of them
    every second. The block ends with TimeoutError.
    """

    __slots__ = ("_cancelling", "_task", "at", "passed")

    def __init__(self, at: float) -> None:
        """`at` is the time, by the clock of whoever looks."""
        self.at = at
        self.passed = False
        self._task: asyncio.Task | None = None

    def __enter__(self) -> "Deadline":
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def break_off(self) -> None:
        """End the block now, if it has not ended yet."""
        if self._task is not None and not self.passed:
            self.passed = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self.passed:
            return
        assert task is not None
        # Others may have cancelled the task as well: then it ends as they want.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
