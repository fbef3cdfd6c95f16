"""Stores of remote files, read by ranges of the one version that was seen first: a web server, S3, whatever fsspec knows.

A version is what the store calls it (ETag, else the time of its change) and the size. Every range is asked for of that
version (`If-Match`) and its reply is compared, so that rows of two versions are never mixed.
"""

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import fsspec
import fsspec.asyn

from scripts.lib.core.errors import UserError
from scripts.lib.core.waiting import TRANSIENT, Transient, asked_to_wait
from scripts.lib.prompts.sources.reading import CHANGED

READ_TIMEOUT_SECONDS = 120
COPY_BYTES = 1 << 20


class PinnedFile(Protocol):
    """One remote file."""

    version: dict[str, Any]  # what is known of the bytes that are read; empty before the first of them

    @property
    def has_ranges(self) -> bool:
        """Whether bytes can be read in any order; known after the first read."""
        ...

    def read(self, position: int, size: int) -> bytes:
        """Bytes from `position` on, fewer than `size` also before the end, none behind it.

        Raises Transient when it may work later, UserError when the file is another one by now, OSError otherwise.
        """
        ...

    def check(self) -> None:
        """Raises UserError when the file was read in one go and is another one by now."""
        ...

    def close(self) -> None: ...


def _pinned(name: str, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The version. Raises UserError when it is no longer the one of before."""
    if any(before[key] != now[key] for key in before.keys() & now.keys()):
        raise UserError(f"{name}: {CHANGED}")
    return before or now


class WebFile:
    """A file of a web server: by ranges where the server has them and names versions, else in one go."""

    def __init__(self, url: str, name: str):
        self.version: dict[str, Any] = {}
        self.has_ranges = True
        self._url, self._name = url, name
        self._session: Any = None
        self._stream: Any = None  # the reply that is read on, where there are no ranges
        self._streamed = 0
        self._hash = hashlib.sha256()

    def read(self, position: int, size: int) -> bytes:
        return _in_loop(self._read, position, size)

    def check(self) -> None:
        if not self.has_ranges:
            _in_loop(self._check_stream)

    async def _check_stream(self) -> None:
        await self._open_stream()
        await self._close()

    def close(self) -> None:
        _in_loop(self._close)

    async def _read(self, position: int, size: int) -> bytes:
        import aiohttp

        if self.version.get("size") is not None and position >= self.version["size"]:
            return b""
        try:
            if self.has_ranges and (data := await self._range(position, size)) is not None:
                return data
            return await self._next(position, size)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            await self._drop_stream()
            raise Transient(OSError(_line(error))) from None

    async def _range(self, position: int, size: int) -> bytes | None:
        """None where the server has no ranges, or names no versions."""
        headers = {"Range": f"bytes={position}-{position + size - 1}"}
        etag = self.version.get("etag", "")
        if etag and not etag.startswith("W/"):
            headers["If-Match"] = etag
        reply = await self._get(headers)
        try:
            if reply.status == 412:
                raise UserError(f"{self._name}: {CHANGED}")
            found = _content_range(reply.headers.get("Content-Range", ""))
            if reply.status == 416 and found is not None and found[1] is not None:
                self.version = _pinned(self._name, self.version, _version(reply.headers, found[1]))
                return b""
            self._check(reply)
            version = _version(reply.headers, found[1] if found else None)
            if reply.status == 206 and found and version.get("size") is not None and len(version) > 1:
                self.version = _pinned(self._name, self.version, version)
                if found[0] != position:
                    raise OSError(f"asked for bytes from {position} on, got them from {found[0]} on")
                return await reply.read()
            if self.version:
                raise UserError(f"{self._name}: {CHANGED}")  # it had ranges before
            self.has_ranges = False
            if reply.status == 200 and not position:
                self._stream, reply = reply, None
                self._begin_stream()
            return None
        finally:
            if reply is not None:
                reply.close()

    async def _next(self, position: int, size: int) -> bytes:
        """The next bytes of the one reply; after a break those before them are read again and compared."""
        if self._stream is None or position != self._streamed:
            before = self._hash.digest() if position == self._streamed else None
            await self._open_stream()
            while self._streamed < position and await self._take(min(COPY_BYTES, position - self._streamed)):
                pass
            if self._streamed != position or (before is not None and self._hash.digest() != before):
                raise UserError(f"{self._name}: {CHANGED}")
        return await self._take(size)

    async def _open_stream(self) -> None:
        await self._drop_stream()
        self._stream = await self._get({})
        self._check(self._stream)
        self._begin_stream()

    def _begin_stream(self) -> None:
        self._streamed, self._hash = 0, hashlib.sha256()
        size = self._stream.headers.get("Content-Length", "")
        now = _version(self._stream.headers, int(size) if size.isdigit() else None)
        self.version = _pinned(self._name, self.version, now)

    async def _take(self, size: int) -> bytes:
        data = await self._stream.content.read(size)
        self._hash.update(data)
        self._streamed += len(data)
        return data

    async def _get(self, headers: dict[str, str]) -> Any:
        if self._session is None:
            import aiohttp

            # The default allows five minutes for a whole file.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=READ_TIMEOUT_SECONDS)
            # Addresses that a server sends on to are signed as they stand.
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, requote_redirect_url=False)
        return await self._session.get(_exact(self._url), headers={"Accept-Encoding": "identity", **headers})

    def _check(self, reply: Any) -> None:
        status = reply.status
        if status in (404, 410):
            raise UserError(f"{self._name}: {CHANGED}") if self.version else FileNotFoundError(self._name)
        if status in TRANSIENT:
            raise Transient(OSError(f"HTTP {status}"), asked_to_wait(reply.headers, time.time()))
        if status >= 400:
            raise OSError(f"HTTP {status}")

    async def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _close(self) -> None:
        await self._drop_stream()
        if self._session is not None:
            await self._session.close()
            self._session = None


def _in_loop(act: Callable[..., Any], *arguments: Any) -> Any:
    return fsspec.asyn.sync(fsspec.asyn.get_loop(), act, *arguments)


def _exact(url: str) -> Any:
    """The URL as it was given: a signature is one of its very characters."""
    import yarl

    return yarl.URL(url, encoded=url.isascii() and " " not in url)


def _content_range(value: str) -> tuple[int, int | None] | None:
    """(first byte, size of the file) of `bytes 0-99/1000`; the first byte of `bytes */1000` is 0."""
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", value.strip())
    if found is None:
        return None
    return int(found[1] or 0), None if found[2] == "*" else int(found[2])


def _version(headers: Mapping[str, str], size: int | None) -> dict[str, Any]:
    known = {"size": size, "etag": headers.get("ETag"), "last_modified": headers.get("Last-Modified")}
    return {key: value for key, value in known.items() if value is not None}


def s3_client() -> Any:
    """A client of S3: credentials, AWS_REGION and AWS_ENDPOINT_URL of the environment; unsigned without credentials."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    session = boto3.session.Session()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or session.region_name or "us-east-1"
    unsigned = {} if session.get_credentials() else {"signature_version": UNSIGNED}
    config = Config(read_timeout=READ_TIMEOUT_SECONDS, retries={"mode": "standard", "max_attempts": 2}, **unsigned)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return session.client("s3", region_name=region, endpoint_url=endpoint, config=config)


class S3File:
    """An object of S3."""

    has_ranges = True

    def __init__(self, client: Any, bucket: str, key: str, name: str):
        self.version: dict[str, Any] = {}
        self._client, self._bucket, self._key, self._name = client, bucket, key, name

    def read(self, position: int, size: int) -> bytes:
        from botocore.exceptions import BotoCoreError, ClientError

        if self.version and position >= self.version["size"]:
            return b""
        pinned = {"IfMatch": self.version["etag"]} if self.version else {}
        place = {"Bucket": self._bucket, "Key": self._key}
        try:
            reply = self._client.get_object(**place, Range=f"bytes={position}-{position + size - 1}", **pinned)
            found = _content_range(reply.get("ContentRange", ""))
            total = found[1] if found else reply["ContentLength"]
            self.version = _pinned(self._name, self.version, {"size": total, "etag": reply["ETag"]})
            return reply["Body"].read()
        except ClientError as error:
            return self._meaning(error)
        except (BotoCoreError, OSError) as error:  # also urllib3's, which botocore lets through as its own
            raise Transient(OSError(_line(error))) from None

    def _meaning(self, error: Any) -> bytes:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = error.response.get("Error", {}).get("Code", "")
        if status == 412:
            raise UserError(f"{self._name}: {CHANGED}") from None
        if status == 416 and not self.version:  # an object without bytes
            self.version = {"size": 0, "etag": ""}
            return b""
        if status == 404:
            if self.version:
                raise UserError(f"{self._name}: {CHANGED}") from None
            raise FileNotFoundError(self._name) from None
        if status in TRANSIENT or code in ("SlowDown", "RequestTimeout", "InternalError"):
            headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            raise Transient(OSError(f"HTTP {status} {code}"), asked_to_wait(headers, time.time())) from None
        raise OSError(f"HTTP {status} {code}") from None

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class OtherFile:
    """A file of any store that fsspec knows: what the store says of it is compared whenever it is opened."""

    has_ranges = True
    _TAGS = ("size", "ETag", "etag", "mtime", "updated", "generation", "LastModified", "last_modified", "created")

    def __init__(self, filesystem: Any, path: str, name: str):
        self.version: dict[str, Any] = {}
        self._filesystem, self._path, self._name = filesystem, path, name
        self._file: Any = None

    def read(self, position: int, size: int) -> bytes:
        try:
            if self._file is None:
                self.version = _pinned(self._name, self.version, self._seen())
                self._file = self._filesystem.open(self._path, "rb")
            if self._file.tell() != position:
                self._file.seek(position)
            return self._file.read(size)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, fsspec.exceptions.FSTimeoutError) as error:
            self._file = None
            raise Transient(OSError(_line(error))) from None

    def _seen(self) -> dict[str, Any]:
        info = self._filesystem.info(self._path)
        return {
            key: value if key == "size" else str(value) for key in self._TAGS if (value := info.get(key)) is not None
        }

    def check(self) -> None:
        self._filesystem.invalidate_cache()
        _pinned(self._name, self.version, self._seen())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(error: BaseException) -> str:
    """One line of the innermost cause, without the keys of a URL that it may name."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return without_keys(" ".join(str(error).split()))[:200] or type(error).__name__


def without_keys(text: str) -> str:
    """The text without users, passwords and queries of the URLs in it."""
    return re.sub(r"//[^/@\s'\"]+@", "//", re.sub(r"\?[^\s'\"]+=[^\s'\"]*", "?...", text))


def copied(read: Callable[[int, int], bytes], target: io.BufferedIOBase) -> None:
    """Copy a whole file."""
    position = 0
    while data := read(position, COPY_BYTES):
        target.write(data)
        position += len(data)
