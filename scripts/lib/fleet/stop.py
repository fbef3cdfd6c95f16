"""Ending a run's servers without waiting for the linger."""

import time
from collections.abc import Callable
from pathlib import Path

from scripts.lib.core.errors import explain
from scripts.lib.core.paths import State
from scripts.lib.fleet import processes, tickets
from scripts.lib.fleet.folder import FleetFolder

_POLL = 0.1


def stop_servers(state: Path, patience: float, say: Callable[[str], None]) -> None:
    """Ask the keeper on this machine to end, and wait until it and the servers are gone.

    Jobs that still hold a lease keep them: then it returns at once. What a killed keeper left behind
    is killed. Waits at most `patience` seconds.
    """
    folder = FleetFolder.of(state)
    end = time.monotonic() + patience
    while folder.keeper_lives():
        if using := tickets.live(folder.lanes):
            say(f"the servers stay up: {len(using)} jobs are using them")
            return
        try:
            folder.stop.touch()
        except OSError as error:
            say(f"the servers can't be told to end, and end by themselves soon: {explain(error)}")
            return
        if time.monotonic() > end:
            say(f"the servers did not end within {patience:.0f} s; their logs: {State(state).servers}")
            return
        time.sleep(_POLL)
    if left := processes.sweep(str(folder.directory)):
        say(f"killed what a dead keeper had left: processes {', '.join(map(str, left))}")
