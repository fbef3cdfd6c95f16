"""Where the corpus lies and how a new version takes its place.

`training` is a relative symbolic link to `corpora/{version}` beside it; a version never changes once
the link points to it. Swapping the link is one rename, so a reader sees the old corpus or the new
one, never a mixture, whatever instant a writer is killed at.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.lib.core import durable, locks
from scripts.lib.core.errors import DISK_FULL, UserError
from scripts.lib.training import manifest

STAGING_SUFFIX = ".partial"


def corpora(training: Path) -> Path:
    """The folder of all versions."""
    return training.parent / "corpora"


def current(training: Path) -> Path | None:
    """The folder of the current version, None when there is no corpus (or its folder was removed).

    Raises UserError when `training` is something that this project didn't put there.
    """
    if not training.is_symlink():
        if training.exists():
            raise UserError(f"{training}: is not a link to a corpus version: move it away and run again")
        return None
    directory = training.parent / os.readlink(training)
    return directory if directory.is_dir() else None


@contextlib.contextmanager
def writer(training: Path) -> Iterator[None]:
    """Be the only writer of the corpus and its backups. Raises UserError when there is another one.

    Remains of a writer that was killed are removed, and a full disk is told in one line.
    """
    folder = corpora(training)
    folder.mkdir(parents=True, exist_ok=True)
    with locks.hold(folder / ".lock", wait=locks.PATIENCE, what=str(training)):
        clear_remains(folder)
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                where = error.filename or folder
                raise UserError(f"{where}: the disk is full: free some space and run again, nothing is lost") from error
            raise


def clear_remains(folder: Path) -> None:
    """Remove what a killed writer left in `folder` and in the version or backup folders inside it."""
    for remains in [*folder.glob(f".*{STAGING_SUFFIX}"), *folder.glob(f"*/.*{STAGING_SUFFIX}")]:
        if remains.is_dir() and not remains.is_symlink():
            shutil.rmtree(remains)
        else:
            remains.unlink(missing_ok=True)  # it may have lain in a folder that is gone by now


def remove(directory: Path) -> None:
    """Remove a version or backup: out of sight in one rename first, so that no half of one is ever seen."""
    doomed = directory.with_name(f".{directory.name}{STAGING_SUFFIX}")
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


@contextlib.contextmanager
def staging(directory: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a new folder beside `directory`; on success rename it to `directory`, durably.

    Files inside must be closed and fsynced by whoever writes them (`durable`); the folder is removed
    on an exception. With `replace`, a `directory` that is there makes way, just before the rename.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}{STAGING_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        durable.fsync_directory(temporary)
        if replace and directory.exists():
            shutil.rmtree(directory)
        os.rename(temporary, directory)
        durable.fsync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def swap(training: Path, directory: Path) -> None:
    """Let `training` point to `directory`, atomically and durably."""
    link = training.with_name(f".{training.name}{STAGING_SUFFIX}")
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(directory, training.parent))
    os.replace(link, training)
    durable.fsync_directory(training.parent)


def all_versions(training: Path) -> list[Path]:
    """Folders of all complete versions."""
    return sorted(path.parent for path in corpora(training).glob(f"[!.]*/{manifest.MANIFEST}"))


def prune(training: Path, covered: Callable[[str], bool]) -> list[str]:
    """Remove the versions that are not current and that a good backup covers. Returns their names."""
    keep = current(training)
    removed = []
    for directory in all_versions(training):
        if directory != keep and covered(directory.name):
            remove(directory)
            removed.append(directory.name)
    return removed
