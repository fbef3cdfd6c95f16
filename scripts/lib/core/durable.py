"""Files that survive a crash: written whole under a temporary name, fsynced, renamed."""

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson

from scripts.lib.core.errors import DISK_FULL, UserError

TEMPORARY_SUFFIX = ".partial"
_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)


def fsync_directory(directory: Path) -> None:
    """Make renames and new names inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the bytes of a closed file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success fsync it and rename it to `path`.

    `path` therefore never exists half-written. On an exception the temporary file is removed
    and `path` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The pid keeps two writers of one path from sharing a temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        fsync_file(temporary)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        # Writes don't say of which file; others name the temporary one.
        if error.errno in DISK_FULL or str(error.filename) == str(temporary):
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def link_or_copy(source: Path, destination: Path) -> None:
    """Make `destination` hold what `source` does: a hard link where there are any, or a copy with the same mode.

    Other file systems, FAT, object stores and several network file systems have none between these two places, and
    each says so with an errno of its own. What stands in the way of a copy as well is raised.
    """
    destination.unlink(missing_ok=True)  # it may be a link itself: a copy would then overwrite the file that it shares
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
        shutil.copymode(source, destination)


def copy(source: Path, destination: Path) -> None:
    """Make `destination` a file of its own with the bytes and mode of `source`.

    Where the file system can, it shares the blocks until one of the two is written to (`reflink`): no time, no space.
    """
    destination.unlink(missing_ok=True)
    if not reflink(source, destination):
        shutil.copyfile(source, destination)
    shutil.copymode(source, destination)


def reflink(source: Path, destination: Path) -> bool:
    """Make `destination` share the blocks of `source` until either changes. False, and no file, where nothing can.

    Btrfs, XFS, bcachefs and ZFS can, and NFS 4.2 on top of them. Each of the others refuses in its own words.
    """
    with open(source, "rb") as old, open(destination, "wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            return True
        except OSError:
            destination.unlink()
            return False


def can_reflink(source: Path, folder: Path) -> bool:
    """Whether `copy` from there to this folder takes no space."""
    trial = folder / f".reflink.{os.getpid()}{TEMPORARY_SUFFIX}"
    try:
        return reflink(source, trial)
    finally:
        trial.unlink(missing_ok=True)


def remove_remains(path: Path | str) -> None:
    """Remove what killed writers of `path` left, by a writer who is the only one."""
    path = Path(path)
    for remains in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY_SUFFIX}"):
        remains.unlink(missing_ok=True)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Replace `path` with `data`, durably and atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: object) -> None:
    """Replace `path` with `value` as indented JSON, keys in the order given."""
    write_bytes(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path | str) -> dict:
    """Read a JSON object that `write_json` wrote.

    Raises UserError when the file is missing or holds something else.
    """
    try:
        value = orjson.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_free_space(directory: Path, needed: int, purpose: str) -> None:
    """Raise UserError when the file system of `directory` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise UserError(
            f"{directory}: {purpose} needs {needed / 1e9:.2f} GB free, {free / 1e9:.2f} GB is left: "
            "free some space and run again, nothing is lost"
        )
