"""What a job says while it runs: lines about its shard and about the whole run, and the progress files."""

import asyncio
from collections.abc import Callable

from scripts.lib.completions.progress import Meter, ProgressFile, Status, line
from scripts.lib.core.command import say

LINE_SECONDS = 5.0  # between lines about the whole run, whichever job says them
_OWN_LINE_SECONDS = 30.0  # between a job's lines about its own shard


class Reporter:
    """Tells how far one job is."""

    def __init__(self, meter: Meter, files: ProgressFile, in_flight: Callable[[], int]) -> None:
        self.meter, self.files, self.in_flight = meter, files, in_flight
        self._own_line = float("-inf")

    def say(self, text: str) -> None:
        say(f"{self.meter.name} {text}")

    async def keep(self, ready: Callable[[], bool]) -> None:
        """Tell until cancelled; the job runs from when `ready` first says so."""
        status: Status = "waiting"
        while True:
            if ready():
                status = "running"
            await self.tell(status)
            await asyncio.sleep(LINE_SECONDS)

    async def tell(self, status: Status) -> None:
        """Write the progress files, and the lines whose time has come."""
        self.meter.in_flight = self.in_flight()
        figures = self.meter.figures(status)
        now = self.meter.clock()
        if status == "running" and now - self._own_line >= _OWN_LINE_SECONDS:
            self._own_line = now
            say(line(self.meter.name, figures))
        try:
            run = await asyncio.to_thread(self.files.write, figures, LINE_SECONDS)
        except OSError as error:
            self.say(f"warning: no progress file: {error.strerror}")
        else:
            if run is not None:
                say(line("all", run))
