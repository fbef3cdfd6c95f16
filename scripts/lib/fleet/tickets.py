"""Counting leases: each holds a locked file of its own, so the dead ones show themselves."""

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

from scripts.lib.core.errors import UserError
from scripts.lib.fleet.folder import try_lock


class Ticket:
    """A locked file in `folder`, until it is given back or the process ends.

    Raises UserError where the file system has no flock.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{os.getpid()}.{uuid.uuid4().hex}"
        # It gets its name only once it is locked, so nobody takes it for a dead one.
        unnamed = folder / f".{self.path.name}"
        self._descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{folder}: this file system has no file locks ({error.strerror}): put the results on one that has flock"
            ) from None
        os.rename(unnamed, self.path)

    def give_back(self) -> None:
        """Take the file away."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


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
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor, fcntl.LOCK_SH):
            return True
        path.unlink()
        return False
    finally:
        os.close(descriptor)
