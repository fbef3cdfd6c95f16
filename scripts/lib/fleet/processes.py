"""Finding and ending processes that a server left behind.

Everything that a keeper starts carries the fleet's folder in its environment. So whatever session
or process group a child moved to, and whoever of its parents was killed, it is found in /proc.
"""

import contextlib
import ctypes
import os
import signal
import time

import psutil

MARKER = "DRAFTER_CORPUS_FLEET"  # the fleet's folder
SERVER = "DRAFTER_CORPUS_SERVER"  # index of the server in the fleet

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, as init would (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(directory: str, server: int | None = None) -> list[psutil.Process]:
    """Living processes of a fleet (of one of its servers), zombies and this process not counted."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
            if environment.get(MARKER) == directory and server in (None, int(environment.get(SERVER, -1))):
                found.append(process)
    return found


def sweep(directory: str, server: int | None = None, patience: float = 30.0) -> list[int]:
    """Kill what is left of a fleet (of one server) and wait for its end. Returns the pids that were found.

    Looks again until nothing is left, because a process may fork while the list is made. Those found are
    waited for by their pid: an ending process has no environment any more, but may still hold GPU memory.
    Gives up after `patience` seconds (inside a GPU driver's call a process can't be killed).
    """
    found: dict[int, psutil.Process] = {}
    end = time.monotonic() + patience
    while time.monotonic() < end:
        fresh = marked(directory, server)
        found |= {process.pid: process for process in fresh}
        for process in fresh:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not fresh and all(map(ended, found.values())):
            break
        if found:
            time.sleep(0.05)
    return list(found)


def ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or only its entry waits for a parent to read the exit status."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
