"""Errors that are the user's to mend: one clear line, never a traceback."""

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable

from scripts.lib.core.screen import visible

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ACCESS = (errno.EROFS, errno.EACCES)
# Of a file or folder that is named: something else is in its place, or its file system or the limits of the user fail.
_OF_A_PLACE = (
    errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE,
    errno.ENOTCONN, errno.EMFILE, errno.ENFILE,
)  # fmt: skip


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, what to do."""


def explain(error: OSError) -> str:
    """One line about a full disk, or a file or folder that can't be used."""
    where = error.filename or os.getcwd()
    if error.errno in DISK_FULL:
        return f"{where}: the disk is full: free some space and run again, nothing is lost"
    what = os.strerror(error.errno).lower() if error.errno else str(error)
    mend = "make it accessible" if error.errno in NO_ACCESS else "mend that"
    return f"{where}: {what}: {mend} and run again, nothing is lost"


def is_of_a_place(error: OSError) -> bool:
    """Whether the user can mend it: more likely a disk or a path than this code."""
    return error.errno in DISK_FULL + NO_ACCESS or (bool(error.filename) and error.errno in _OF_A_PLACE)


def entry(main: Callable[..., None]) -> Callable[..., int]:
    """Wrap an entry's `main(argv)`: a UserError becomes one line on stderr and exit code 1."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        try:
            main(argv)
        except UserError as error:
            print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
            return 1
        except BrokenPipeError:
            # The reader (head, less) went away: not an error. Keep the interpreter from
            # complaining when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            if not is_of_a_place(error):
                raise
            print(f"error: {visible(explain(error))}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return 0

    return run
