"""What is still to be asked: prompts from a stream, and those that wait for another try."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scripts.lib.client.attempts import Attempts
from scripts.lib.core.records import Prompt, Turn


@dataclass(slots=True, eq=False)
class Work:
    """A prompt on its way to an outcome."""

    prompt: Prompt
    turns: list[Turn] = field(default_factory=list)
    part: Turn | None = None  # a truncated answer that is to be continued or asked again
    prompt_ids: list[int] | None = None  # of the next turn, rendered
    resamples: int = 0  # answers that were worth another seed
    spare: int = 0  # tokens of the context that its requests leave free
    attempts: Attempts = field(default_factory=Attempts)


W = TypeVar("W")


class Backlog(Generic[W]):
    """Hands out work to many workers; knows when there is none left. Retries come before new prompts."""

    def __init__(self, prompts: Iterator[W], clock: Callable[[], float], most_waiting: int) -> None:
        """New prompts are not taken from the stream while `most_waiting` pieces wait for another try."""
        self._most_waiting = most_waiting
        self._streams = deque([prompts])
        self._clock = clock
        self._delayed: list[tuple[float, int, W]] = []
        self._sequence = 0
        self._active = 0
        self._idle: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def get(self) -> W | None:
        """The next piece of work; None when everything is done. Call `finished` or `again` for each."""
        while True:
            work = self._ready()
            if work is not None:
                self._active += 1
                self._set_timer()
                return work
            if not self._active and not self._delayed:
                self._wake_all()
                return None
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            self._set_timer()
            await waiting

    def _ready(self) -> W | None:
        if self._delayed and self._delayed[0][0] <= self._clock():
            return heapq.heappop(self._delayed)[2]
        while self._streams and len(self._delayed) < self._most_waiting:
            work = next(self._streams[0], None)
            if work is not None:
                return work
            self._streams.popleft()
        return None

    def finished(self) -> None:
        """A piece of work has its outcome."""
        self._active -= 1
        if not self._active:
            self._wake_all()

    def again(self, work: W, delay: float) -> None:
        """A piece of work is to be handed out again after `delay` seconds."""
        self._active -= 1
        self._sequence += 1
        heapq.heappush(self._delayed, (self._clock() + delay, self._sequence, work))
        self._set_timer()

    def add(self, prompts: Iterator[W]) -> None:
        """More work, after what there is."""
        self._streams.append(prompts)
        self._wake_all()

    @property
    def open(self) -> bool:
        """Whether there may be work."""
        return bool(self._streams or self._delayed or self._active)

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for another try."""
        return len(self._delayed)

    def _set_timer(self) -> None:
        """Wake an idle worker when the next delayed piece is due."""
        if not self._delayed or not self._idle:
            return
        loop = asyncio.get_running_loop()
        if self._timer:
            self._timer.cancel()
        self._timer = loop.call_later(max(0.0, self._delayed[0][0] - self._clock()), self._due)

    def _due(self) -> None:
        self._timer = None
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
