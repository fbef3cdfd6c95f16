"""Ports of the loopback interface for servers.

They lie below those that the kernel gives to connections: a server binds its port minutes after it was chosen (SGLang
after the model load), and meanwhile a connection of one of our own clients may get it. Among fleets of one user each
port has one owner, by a lock that lasts as long as the keeper.
"""

import contextlib
import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from scripts.lib.core.locks import Lock

_FIRST, _COUNT = 20_000, 2_000  # SGLang itself draws from 22,000 on
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports:
    """The ports of one keeper. `folder` holds the locks of all fleets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[int, Lock | None] = {}

    def take(self, wanted: int = 0) -> int:
        """A port that nobody uses or owns: `wanted` when it is free. Raises OSError when there is none."""
        for port in _candidates(wanted):
            if port in self._held:
                if port == wanted and is_free(port):
                    return port
                continue
            lock = self._lock(port)
            if (lock is None or lock.take()) and is_free(port):
                self._held[port] = lock
                return port
            if lock:
                lock.close()
        raise OSError(errno.EADDRINUSE, f"no port of 127.0.0.1 is free from {_window().start} to {_window().stop - 1}")

    def _lock(self, port: int) -> Lock | None:
        """The lock of a port; None where none can be made (a full disk): then only who listens there is asked."""
        with contextlib.suppress(OSError):
            return Lock(self._folder / str(port))
        return None

    def give_back(self, port: int) -> None:
        """Others may have it."""
        if lock := self._held.pop(port, None):
            lock.close()


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        # As servers do: connections of the one before, which are still closing, don't matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _candidates(wanted: int) -> Iterator[int]:
    if wanted:
        yield wanted
    window = _window()
    start = random.randrange(len(window))  # fleets that start at once don't try the same ones
    yield from (window[(start + step) % len(window)] for step in range(len(window)))


def _window() -> range:
    """Ports to choose from: below the kernel's own, wherever these begin."""
    try:
        first_of_kernel = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_of_kernel = 32_768
    if first_of_kernel < _FIRST + _COUNT and first_of_kernel > 1_024 + _COUNT:
        return range(first_of_kernel - _COUNT, first_of_kernel)
    return range(_FIRST, _FIRST + _COUNT)
