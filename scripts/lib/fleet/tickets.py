"""Counting leases: each holds a locked file of its own, so the dead ones show themselves."""

import contextlib
import os
import uuid
from pathlib import Path

from scripts.lib.core.locks import hold, is_held


class Ticket:
    """A locked file in `folder`, until it is given back or the process ends.

    Raises UserError where the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{os.getpid()}.{uuid.uuid4().hex}"
        # It gets its name only once it is locked, so nobody takes it for a dead one.
        unnamed = folder / f".{self.path.name}"
        self._lock = hold(unnamed)
        os.rename(unnamed, self.path)

    def give_back(self) -> None:
        """Take the file away."""
        self.path.unlink(missing_ok=True)
        self._lock.close()


def live(folder: Path) -> list[str]:
    """Names of the held tickets in a folder and below, in order. Files of dead holders are removed."""
    names = []
    for parent, _, files in os.walk(folder):
        for name in files:
            if not name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    if _held(Path(parent) / name):
                        names.append(name)
    return sorted(names)


def _held(path: Path) -> bool:
    if is_held(path):
        return True
    path.unlink()
    return False
