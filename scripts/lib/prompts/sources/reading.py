"""Which bytes of a source were read: what provenance says of a file is true of its rows.

A file that is replaced while it is read would give rows of two versions, or be described as the one that nobody has
read (duckdb-httpfs issue 111, filesystem_spec issue 1140). So a local file is hashed as it is read and looked at again
afterwards; files elsewhere are pinned to the version that was seen first.
"""

import hashlib
import io
import os
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError

CHANGED = "changed while it was read: run again when nothing writes to it"


class SourceFile(Protocol):
    """One file of a source, wherever it lies. `name` is what people see in messages."""

    name: str

    def open(self) -> BinaryIO:
        """Its bytes, from the beginning; read to the end before `describe` is asked."""
        ...

    def describe(self) -> dict[str, Any]:
        """Which bytes were read (before that: which would be), for provenance: size, and digest or version.

        Raises UserError when they are not the file's any more.
        """
        ...


class Hashed(io.RawIOBase):
    """A stream that hashes what is read of it, from its beginning to its end."""

    def __init__(self, raw: Any):
        self._raw = raw
        self._hash = hashlib.sha256()
        self._ended = False
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._raw.readinto(buffer)
        self._hash.update(memoryview(buffer)[:size])
        self.size += size
        self._ended = self._ended or (not size and len(buffer) > 0)
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()

    def sha256(self) -> str | None:
        """Of all bytes; None when the end was not reached."""
        return self._hash.hexdigest() if self._ended else None


class LocalFile:
    """A file of this machine as a part of a source."""

    def __init__(self, path: str, random_access: bool, name: str | None = None):
        """`random_access`: whether its reader jumps about in it, so that it is hashed beforehand."""
        self.name = name or path
        self.path = path
        self._random_access = random_access
        self._seen: tuple[int, ...] | None = None
        self._digest: Callable[[], tuple[int, str | None]] = lambda: (0, None)

    def open(self) -> BinaryIO:
        raw = open(self.path, "rb", buffering=0)  # noqa: SIM115 - the reader closes it
        status = os.fstat(raw.fileno())
        self._seen = _identity(status)
        if self._random_access:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
            self._digest = lambda: (status.st_size, digest)
            raw.seek(0)
            return io.BufferedReader(raw)
        hashed = Hashed(raw)
        self._digest = lambda: (hashed.size, hashed.sha256())
        return hashed  # type: ignore[return-value]

    def describe(self) -> dict[str, Any]:
        if self._seen is None:
            return {"size": os.path.getsize(self.path), "sha256": durable.sha256_file(self.path)}
        size, digest = self._digest()
        try:
            # Touched, replaced by the same bytes, or appended to before the end was read: nothing is missed.
            same = _identity(os.stat(self.path)) == self._seen or durable.sha256_file(self.path) == digest
        except OSError:
            same = False
        if digest is None or not same:
            raise UserError(f"{self.name}: {CHANGED}")
        return {"size": size, "sha256": digest}


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What tells one content of a path from another; the change time also where the modification time was put back."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
