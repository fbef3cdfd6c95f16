"""File locks: who is the only writer, who uses something, who must wait.

flock, not POSIX record locks: those vanish when any descriptor of the file is closed. The kernel gives a lock back when
its holder ends, also after kill -9. Linux sends flock to the NFS server too (since 2.6.12).
"""

import errno
import fcntl
import math
import os
import socket
import time
from pathlib import Path

from scripts.lib.core.errors import UserError

PATIENCE = 5.0  # seconds that a predecessor which is just dying gets
_LOOK = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """The lock of a file, which is made when it isn't there. Closing gives it back; programs started here don't get it."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """`descriptor` is that of the open file, where it was inherited."""
        self.path = path
        if descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.set_inheritable(descriptor, False)
        self.descriptor = descriptor

    def take(self, *, shared: bool = False, wait: float = 0.0) -> bool:
        """Lock it, as one of several holders when `shared`. False when somebody is in the way for `wait` seconds.

        Raises UserError where the file system has no locks.
        """
        kind, end = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + wait
        while True:
            try:
                fcntl.flock(self.descriptor, kind if wait == math.inf else kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(_LOOK)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                raise UserError(
                    f"{self.path}: the file system has no locks ({error.strerror}): mount it with locks (NFS: without "
                    "`nolock`; Lustre: with `flock`) or put the folder elsewhere"
                ) from None

    def release(self) -> None:
        """Let others take it."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def in_place(self) -> bool:
        """Whether the path still is this file (somebody may have emptied /tmp)."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    @property
    def holder(self) -> str:
        """Who said last that the lock is theirs."""
        return os.pread(self.descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"

    @holder.setter
    def holder(self, text: str) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{text}\n".encode(), 0)

    def close(self) -> None:
        """Give it back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hold(path: Path, *, shared: bool = False, wait: float = math.inf, what: str = "") -> Lock:
    """The lock of a file, taken.

    `what` names to people what the lock's only holder writes. Raises UserError naming who holds it when it isn't free
    within `wait` seconds.
    """
    lock = Lock(path)
    try:
        if not lock.take(shared=shared, wait=wait):
            raise UserError(f"{what or path} is being written by {lock.holder}: wait until that job ends, or stop it")
        if what:
            lock.holder = f"process {os.getpid()} on {socket.gethostname()}"
    except BaseException:
        lock.close()
        raise
    return lock


def is_held(path: Path) -> bool:
    """Whether somebody is the lock's only holder. Raises FileNotFoundError."""
    with Lock(path, os.open(path, os.O_RDWR)) as lock:
        return not lock.take(shared=True)
