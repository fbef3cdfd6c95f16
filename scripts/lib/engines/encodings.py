"""Bodies in other encodings than were asked for: gateways compress them, and mark or widen their characters."""

import contextlib
import json
import zlib
from collections.abc import Mapping

_MARKED = (b"\xef", b"\xfe", b"\xff", b"\0")  # first bytes of byte order marks, and of wide characters without one
_PACKED = ("gzip", "x-gzip", "deflate")
_LARGEST_BODY = 256 << 20  # bytes, unpacked


def plain_body(headers: Mapping[str, str], body: bytes) -> bytes:
    """A body in UTF-8, without byte order mark and compression. What is damaged or unknown comes back as it is."""
    for name in reversed(_encodings(headers)):
        if name in _PACKED:
            body = _unpacked(body)
    if body[:1] in _MARKED:
        with contextlib.suppress(UnicodeDecodeError):
            return body.decode(json.detect_encoding(body)).encode()
    return body


def unknown_encoding(headers: Mapping[str, str]) -> str | None:
    """The encoding of a body that can't be read here."""
    return next((name for name in _encodings(headers) if name not in (*_PACKED, "", "identity")), None)


def _encodings(headers: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in headers.get("content-encoding", "").lower().split(",")]


def _unpacked(body: bytes) -> bytes:
    for bits in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):  # with the header of gzip or zlib; without any
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj(bits).decompress(body, _LARGEST_BODY)
    return body
