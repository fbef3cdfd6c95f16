"""Files behind URLs, read through fsspec as they are needed: `https://...`, `s3://bucket/*.parquet`, `gs://...`.

S3 goes through Arrow's own client: credentials, `AWS_REGION` and `AWS_ENDPOINT_URL` of the environment. Other
protocols need their fsspec package installed.
"""

import contextlib
import io
import os
import re
import time
from collections.abc import Callable
from typing import Any

import fsspec

from scripts.lib.core.errors import UserError
from scripts.lib.core.secrets import without_secrets
from scripts.lib.prompts.sources.files import SourceFile
from scripts.lib.prompts.sources.rows import kind_of

BLOCK_BYTES = 8 << 20
ATTEMPTS = 6
BACKOFF_SECONDS = 1.0  # before the second attempt; doubled each time
READ_TIMEOUT_SECONDS = 120


def remote_files(source: str, where: str) -> list[SourceFile]:
    """The files of a URL, which may hold a glob or name a folder where the store can list. Raises UserError."""
    shown = without_secrets(source)
    try:
        filesystem, path = _filesystem(source)
        if any(sign in path for sign in "*[") or ("?" in path and not source.startswith("http")):
            paths = sorted(filesystem.glob(path))
        elif kind_of(path.partition("?")[0]) is None and filesystem.isdir(path):
            paths = sorted(found for found in filesystem.find(path) if kind_of(found))
        else:
            paths = [path]
        if not paths:
            # `glob` and `find` take a folder that may not be listed for an empty one.
            with contextlib.suppress(FileNotFoundError):
                filesystem.ls(re.split(r"[*?\[]", path)[0].rpartition("/")[0])
    except ImportError as error:
        raise UserError(f"{where}: {shown}: needs a package that isn't installed: {error}") from None
    except (OSError, ValueError, *_network_errors()) as error:
        raise UserError(f"{where}: {shown}: can't be reached: {_line(error)}") from None
    if not paths:
        raise UserError(f"{where}: {shown}: no file matches")
    scheme = source.partition("://")[0]
    return [_file(filesystem, path, path if "://" in path else f"{scheme}://{path}") for path in paths]


def _filesystem(source: str) -> tuple[Any, str]:
    if source.startswith("s3://"):
        import pyarrow.fs
        from fsspec.implementations.arrow import ArrowFSWrapper

        options = {"region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
        return ArrowFSWrapper(pyarrow.fs.S3FileSystem(**options)), source.removeprefix("s3://")
    if source.startswith(("http://", "https://")):
        import aiohttp

        # The default allows five minutes for a whole file.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=READ_TIMEOUT_SECONDS)
        return fsspec.filesystem("http", client_kwargs={"timeout": timeout}, skip_instance_cache=True), source
    return fsspec.core.url_to_fs(source)


def _file(filesystem: Any, path: str, url: str) -> SourceFile:
    def open_file() -> Any:
        return io.BufferedReader(Steady(lambda: filesystem.open(path, "rb", block_size=BLOCK_BYTES)), BLOCK_BYTES)

    def describe() -> dict[str, Any]:
        info = filesystem.info(path)
        # A store's own word for "these bytes", where it has one.
        return {key: str(info[key]) for key in ("size", "ETag", "etag", "mtime") if info.get(key) is not None}

    return SourceFile(without_secrets(url), open_file, describe)


class Steady(io.RawIOBase):
    """A remote file whose reads survive a broken connection: it is opened anew and read on at the same place.

    Raises OSError after ATTEMPTS failures in a row.
    """

    def __init__(self, open_file: Callable[[], Any], sleep: Callable[[float], None] = time.sleep):
        self._open = open_file
        self._sleep = sleep
        self._file: Any = None
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
            offset += self._size()
        self._position = offset
        return offset

    def _size(self) -> int:
        return self._trying(lambda file: file.seek(0, io.SEEK_END))

    def readinto(self, buffer: Any) -> int:
        def read(file: Any) -> bytes:
            if file.tell() != self._position:
                file.seek(self._position)
            return file.read(len(buffer))

        data = self._trying(read)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _trying(self, act: Callable[[Any], Any]) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                if self._file is None:
                    self._file = self._open()
                return act(self._file)
            except (OSError, ValueError, *_network_errors()) as error:
                self._file = None
                status = _status(error)
                if status in (404, 410) or (isinstance(error, FileNotFoundError) and error.__cause__ is None):
                    raise FileNotFoundError(_line(error)) from None
                if status is not None and 400 <= status < 500 and status not in (408, 429):
                    raise OSError(_line(error)) from None
                if attempt == ATTEMPTS - 1:
                    raise OSError(f"gave up after {ATTEMPTS} attempts: {_line(error)}") from None
                self._sleep(BACKOFF_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _network_errors() -> tuple[type[Exception], ...]:
    import aiohttp

    return (aiohttp.ClientError, TimeoutError, fsspec.exceptions.FSTimeoutError)


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error. fsspec calls whatever goes wrong first "file not found", with a cause."""
    return getattr(error, "status", None) or getattr(error.__cause__, "status", None)


def _line(error: Exception) -> str:
    """One line, without the URL that the error's text may hold, and its keys."""
    if status := _status(error):
        return f"HTTP {status}"
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:200] or type(cause).__name__
