"""The facts in a GGUF header.

gguf.GGUFReader builds several objects per vocabulary entry, which takes seconds at each start of a server.
Layout: the GGUF specification (ggml, docs/gguf.md), version 2 and later.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from scripts.lib.core.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def read_header(path: Path, arrays: bool = False) -> dict[str, Any]:
    """Key-value pairs of the header; with `arrays`, vocabulary and merges too.

    Without, only numbers, truth values, texts and short numeric arrays such as heads per layer. Raises UserError when
    the file is missing or isn't a GGUF.
    """
    try:
        with open(path, "rb") as file:
            magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version < 2:
                raise ValueError
            pairs = [_pair(file, arrays) for _ in range(count)]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, KeyError, struct.error):
        raise UserError(f"{path}: not a GGUF file of version 2 or later") from None
    return {key: value for key, value in pairs if value is not None}


def _pair(file: BinaryIO, arrays: bool) -> tuple[str, Any]:
    return _text(file), _value(file, _number(file, "<I"), arrays)


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int, arrays: bool) -> Any:
    """A value; None for an array that isn't wanted."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind])
    of, length = _number(file, "<I"), _number(file, "<Q")
    if of == _STRING:
        if arrays:
            return [_text(file) for _ in range(length)]
        for _ in range(length):
            file.seek(_number(file, "<Q"), 1)
        return None
    layout = f"<{length}{_SCALARS[of][1]}"
    data = file.read(struct.calcsize(layout))
    return list(struct.unpack(layout, data)) if arrays or length <= 1024 else None
