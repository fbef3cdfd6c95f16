"""Files behind URLs, read as they are needed: `https://...`, `s3://bucket/*.parquet`, `gs://...`.

S3 takes credentials, `AWS_REGION` and `AWS_ENDPOINT_URL` of the environment. Other protocols need their fsspec package
installed.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import fsspec
from fsspec.utils import glob_translate

from scripts.lib.core.errors import UserError
from scripts.lib.core.secrets import without_secrets
from scripts.lib.core.waiting import ATTEMPTS, Transient, again_when_transient
from scripts.lib.prompts.sources.files import jumps_about
from scripts.lib.prompts.sources.folders import BOOKKEEPING
from scripts.lib.prompts.sources.pinned_files import (
    OtherFile,
    PinnedFile,
    S3File,
    WebFile,
    copied,
    s3_client,
    without_keys,
)
from scripts.lib.prompts.sources.reading import Hashed, SourceFile
from scripts.lib.prompts.sources.rows import kind_of

BLOCK_BYTES = 8 << 20
RANDOM_BLOCK_BYTES = 1 << 20  # of a file whose reader jumps about in it


def remote_files(source: str, where: str) -> list[SourceFile]:
    """The files of a URL, which may hold a glob or name a folder where the store can list. Raises UserError."""
    shown = without_secrets(source)
    try:
        if source.startswith("s3://"):
            files = _s3_files(source)
        elif source.startswith(("http://", "https://")) and not re.search(r"[*\[]", urlsplit(source).path):
            files = [_file(source, lambda name: WebFile(source, name))]
        else:
            files = _other_files(source)
    except ImportError as error:
        raise UserError(f"{where}: {shown}: needs a package that isn't installed: {error}") from None
    except _errors() as error:
        raise UserError(f"{where}: {shown}: can't be reached: {_told(error)}") from None
    if not files:
        raise UserError(f"{where}: {shown}: no file matches")
    return files


def _errors() -> tuple[type[Exception], ...]:
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, ValueError, aiohttp.ClientError, fsspec.exceptions.FSTimeoutError, BotoCoreError, ClientError)


def _told(error: Exception) -> str:
    """One line of an error, without the keys that the source's URL may hold."""
    return without_keys(" ".join(str(error.__cause__ or error).split()))[:200] or type(error).__name__


def _s3_files(source: str) -> list[SourceFile]:
    bucket, _, key = source.removeprefix("s3://").partition("/")
    client = s3_client()
    if re.search(r"[*?\[]", key):
        matches = re.compile(glob_translate(key))
        keys = [found for found in _keys(client, bucket, re.split(r"[*?\[]", key)[0]) if matches.match(found)]
    elif kind_of(key) is None:
        folder = f"{key.rstrip('/')}/" if key.strip("/") else ""
        keys = [found for found in _keys(client, bucket, folder) if _is_data(found.removeprefix(folder))]
    else:
        keys = [key]

    def opener(key: str) -> Callable[[str], PinnedFile]:
        return lambda name: S3File(client, bucket, key, name)

    return [_file(f"s3://{bucket}/{key}", opener(key)) for key in sorted(keys)]


def _keys(client: Any, bucket: str, prefix: str) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", []) if not entry["Key"].endswith("/")]


def _is_data(path: str) -> bool:
    """Whether a path below a folder is one that a folder of this machine would give."""
    parts = path.split("/")
    return (
        kind_of(path) is not None
        and parts[-1] not in BOOKKEEPING
        and not any(part[0] in "._" for part in parts if part)
    )


def _other_files(source: str) -> list[SourceFile]:
    filesystem, path = fsspec.core.url_to_fs(source)
    if any(sign in path for sign in "*[") or ("?" in path and not source.startswith("http")):
        paths = sorted(filesystem.glob(path))
    elif kind_of(path.partition("?")[0]) is None and filesystem.isdir(path):
        root = path.rstrip("/") + "/"
        paths = sorted(found for found in filesystem.find(path) if _is_data(found.removeprefix(root)))
    else:
        paths = [path]
    if not paths:
        # `glob` and `find` take a folder that may not be listed for an empty one.
        with contextlib.suppress(FileNotFoundError):
            filesystem.ls(re.split(r"[*?\[]", path)[0].rpartition("/")[0])
    scheme = source.partition("://")[0]

    def opener(path: str) -> Callable[[str], PinnedFile]:
        if scheme in ("http", "https"):
            return lambda name: WebFile(path, name)
        return lambda name: OtherFile(filesystem, path, name)

    def url(path: str) -> str:
        return path if "://" in path else f"{scheme}://{path if scheme == 'file' else path.lstrip('/')}"

    return [_file(url(path), opener(path)) for path in paths]


def _file(url: str, opener: Callable[[str], PinnedFile]) -> SourceFile:
    name = without_secrets(url)
    return RemoteFile(name, lambda: opener(name), jumps_about(name))


class RemoteFile:
    """A file elsewhere as a part of a source."""

    def __init__(self, name: str, pinned: Callable[[], PinnedFile], random_access: bool):
        self.name = name
        self._open_pinned = pinned
        self._random_access = random_access
        self._pinned: PinnedFile | None = None
        self._sha256: Callable[[], str | None] = lambda: None

    def open(self) -> BinaryIO:
        self._pinned = pinned = self._open_pinned()
        raw = Steady(pinned, self.name)
        if not self._random_access:
            # In whole blocks, of which the hash takes what is read.
            hashed = Hashed(io.BufferedReader(raw, BLOCK_BYTES))
            self._sha256 = hashed.sha256
            return hashed  # type: ignore[return-value]
        raw.find()
        if not pinned.has_ranges:
            copy = tempfile.TemporaryFile()  # noqa: SIM115 - the reader closes it
            copied(raw.at, copy)
            raw.close()
            copy.seek(0)
            return copy
        return io.BufferedReader(raw, RANDOM_BLOCK_BYTES)

    def describe(self) -> dict[str, Any]:
        if self._pinned is None:
            pinned = self._open_pinned()
            with Steady(pinned, self.name) as raw:
                raw.find()
            return pinned.version
        self._pinned.check()
        digest = self._sha256()
        return self._pinned.version | ({"sha256": digest} if digest else {})


class Steady(io.RawIOBase):
    """A remote file whose reads survive a broken connection and a busy store: they are made again at the same place.

    Raises OSError after ATTEMPTS failures in a row.
    """

    def __init__(self, pinned: PinnedFile, name: str):
        """`name`: whose the waits are that are told."""
        self._pinned, self._name = pinned, name
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            self.find()
            offset += self._pinned.version["size"]
        self._position = offset
        return offset

    def find(self) -> None:
        """Read a byte, so that the file's version is known. Raises FileNotFoundError."""
        if not self._pinned.version:
            self.at(0, 1)

    def readinto(self, buffer: Any) -> int:
        data = self.at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def at(self, position: int, size: int) -> bytes:
        """Bytes from `position` on; none behind the end."""
        try:
            return again_when_transient(lambda: self._read(position, size), self._name)
        except _GaveUp as error:
            raise OSError(f"gave up after {ATTEMPTS} attempts: {error}") from None

    def _read(self, position: int, size: int) -> bytes:
        try:
            return self._pinned.read(position, size)
        except Transient as transient:
            raise Transient(_GaveUp(str(transient)), transient.seconds) from None

    def close(self) -> None:
        if not self.closed:
            self._pinned.close()
        super().close()


class _GaveUp(Exception):
    pass
