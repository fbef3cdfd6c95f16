"""The scalar facts in a GGUF header, without its arrays.

gguf.GGUFReader builds an object per vocabulary entry, which takes seconds at each start of a server;
three numbers are needed. Layout: the GGUF specification (ggml, docs/gguf.md), version 2 and later.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from scripts.lib.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def read_scalars(path: Path) -> dict[str, Any]:
    """Key-value pairs of the header whose value is a number, a truth value or a text.

    Short numeric arrays, such as heads per layer, are kept as lists. Raises UserError when the file
    isn't a GGUF.
    """
    with open(path, "rb") as file:
        try:
            magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version < 2:
                raise ValueError
            return {key: value for key, value in (_pair(file) for _ in range(count)) if value is not None}
        except (ValueError, KeyError, struct.error):
            raise UserError(f"{path}: not a GGUF file of version 2 or later") from None


def _pair(file: BinaryIO) -> tuple[str, Any]:
    return _text(file), _value(file, _number(file, "<I"))


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A value, None for an array of texts or of many numbers."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind])
    of, length = _number(file, "<I"), _number(file, "<Q")
    if of == _STRING:
        for _ in range(length):
            file.seek(_number(file, "<Q"), 1)
        return None
    layout = f"<{length}{_SCALARS[of][1]}"
    data = file.read(struct.calcsize(layout))
    return list(struct.unpack(layout, data)) if length <= 1024 else None
