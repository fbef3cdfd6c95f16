"""Compressed files by their first bytes: gzip, zstd, bzip2, xz, one member after the other until the file's end.

Python's own readers end quietly where something that they don't know follows a member (bz2, lzma), and zstandard's
where a file was cut short: a part of the rows would be missing without a word. Here both are errors.
"""

import bz2
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

COMPRESSIONS = ("gz", "gzip", "zst", "zstd", "bz2", "xz")
BUFFER_BYTES = 1 << 20
_INPUT_BYTES = 1 << 16
_RUN_LENGTH = 1  # the type of zstd's blocks that repeat one byte
_ZSTD_WINDOW = 1 << 31  # `zstd --long=31`, the most that the format's reader takes
_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f: a frame that holds no content (pzstd begins with one)


class _Decompressor(Protocol):
    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """zlib's decompressor, which keeps input that is left over, in the shape of bz2's and lzma's."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


class _Zstandard:
    """One frame, fed block by block: zstandard has no limit for what comes out, and a block gives 128 KiB at most.

    Layout: https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1.
    """

    def __init__(self) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._input, self._at = b"", 0
        self._descriptor: int | None = None  # of the frame, once its header has been fed

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data:
            self._input, self._at = self._input[self._at :] + data, 0
        size = self._piece()
        if size is None:
            return b""
        piece = self._input[self._at : self._at + size]
        if self._descriptor is None:
            self._descriptor = piece[4]
        self._at += size
        try:
            return self._frame.decompress(piece)
        except self._error as error:
            raise OSError(str(error)) from None

    def _piece(self) -> int | None:
        """Bytes of the frame's next piece: its header, or a block; None while it isn't there as a whole."""
        there = len(self._input) - self._at
        if there < (5 if self._descriptor is None else 3):
            return None
        if self._descriptor is None:
            size = _header_size(self._input[self._at + 4])
        else:
            block = int.from_bytes(self._input[self._at : self._at + 3], "little")
            size = 3 + (1 if block >> 1 & 3 == _RUN_LENGTH else block >> 3)
            size += 4 * (self._descriptor >> 2 & 1) if block & 1 else 0  # a checksum follows the last block
        return size if size <= there else None

    @property
    def needs_input(self) -> bool:
        return not self.eof and self._piece() is None

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._input[self._at :]


def _header_size(descriptor: int) -> int:
    """Bytes of a zstd frame's header: magic number, descriptor, window, dictionary id, size of the content."""
    single_segment = descriptor >> 5 & 1
    content_size = (single_segment, 2, 4, 8)[descriptor >> 6]
    return 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + content_size


_DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gzip,
    b"\x28\xb5\x2f\xfd": _Zstandard,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lzma.LZMADecompressor,
}


def is_compressed(head: bytes) -> bool:
    """Whether a file that begins with `head` (8 bytes or more) is one that `Members` reads."""
    return _decompressor(head) is not None or _is_skippable(head)


def _decompressor(head: bytes) -> Callable[[], Any] | None:
    return next((make for magic, make in _DECOMPRESSORS.items() if head.startswith(magic)), None)


def _is_skippable(head: bytes) -> bool:
    return 0x50 <= head[0] <= 0x5F and head[1:4] == _SKIPPABLE if len(head) >= 8 else False


class Members(io.RawIOBase):
    """The content of all members of a compressed file.

    Raises OSError, EOFError, zlib.error or lzma.LZMAError where it is damaged, cut short, or followed by something else.
    """

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        self._member: _Decompressor | None = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, except at the end: a reader may look at the content's beginning in one piece."""
        view = memoryview(buffer)
        filled = 0
        while filled < len(view) and (self._output or self._decompress()):
            part = self._output[: len(view) - filled]
            view[filled : filled + len(part)] = part
            filled += len(part)
            self._output = self._output[len(part) :]
        return filled

    def _decompress(self) -> bool:
        """Fill the output. Returns False at the end of the file."""
        while not self._output:
            if self._member is None and not self._begin():
                return False
            member = self._member
            assert member is not None
            data = b""
            if member.needs_input:
                data, self._input = self._input or self._raw.read(_INPUT_BYTES), b""
                if not data:
                    raise EOFError("it ends in the middle of its compressed data: it was cut short, fetch it again")
            self._output = memoryview(member.decompress(data, BUFFER_BYTES))
            if member.eof:
                self._input, self._member = member.unused_data, None
        return True

    def _begin(self) -> bool:
        """Begin the next member. Returns False at the end of the file."""
        while self._fill(8):
            if not self._input.strip(b"\0"):
                self._input = b""  # padding between and after members
                continue
            if _is_skippable(self._input):
                self._skip(8 + struct.unpack("<I", self._input[4:8])[0])
                continue
            make = _decompressor(self._input)
            if make is None and not self._input[0]:
                self._input = self._input.lstrip(b"\0")
                continue
            if make is None:
                raise OSError("something that isn't compressed follows after its compressed data")
            self._member = make()
            return True
        return False

    def _fill(self, size: int) -> int:
        while len(self._input) < size and (data := self._raw.read(size - len(self._input))):
            self._input += data
        return len(self._input)

    def _skip(self, size: int) -> None:
        while size and self._fill(1):
            step = min(size, len(self._input))
            self._input, size = self._input[step:], size - step
            if size:
                size -= len(self._raw.read(min(size, BUFFER_BYTES)))
        if size:
            raise EOFError("it ends in the middle of a skippable frame: it was cut short, fetch it again")
