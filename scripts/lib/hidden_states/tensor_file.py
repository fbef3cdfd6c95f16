"""Safetensors files as bytes: bfloat16 has no NumPy type, and the client has no torch.

A file is the header's length (8 bytes, little-endian), the header (JSON) and the tensors' bytes. A
bfloat16 is here the upper half of its float32, as uint16.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "I64": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 1 << 20  # of ours; a longer one is no file of ours


class NotBfloat16(ValueError):
    """A number that bfloat16 doesn't hold. `index` is its place."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"{value!r} at {index}")
        self.index, self.value = index, value


class Damaged(ValueError):
    """A file that is not one of ours, or not whole."""


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float64 [...] to the bits of bfloat16, uint16 [...]. Raises NotBfloat16 instead of rounding."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bits = narrow.view(np.uint32)
    wrong = (narrow != values) | ((bits & 0xFFFF) != 0) | ~np.isfinite(values)
    if wrong.any():
        at = int(wrong.argmax())
        raise NotBfloat16(at, float(values.flat[at]))
    return (bits >> 16).astype(np.uint16)


@dataclass(slots=True)
class TensorFile:
    """The content of one file. `tensors`: uint16 means bfloat16, int64 is int64."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]


def pack(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """The file in pieces, to be written one after the other. `sha256` of the tensors' bytes is added to the metadata."""
    header: dict[str, Any] = {}
    pieces: list[bytes | memoryview] = []
    checksum, offset = hashlib.sha256(), 0
    # Wide numbers last would leave them unaligned after an odd count of narrow ones.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        data = np.ascontiguousarray(tensor).data.cast("B")
        end = offset + data.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        checksum.update(data)
        pieces.append(data)
        offset = end
    text = orjson.dumps({"__metadata__": {"format": "pt", **metadata, "sha256": checksum.hexdigest()}, **header})
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def read(path: Path) -> tuple[TensorFile, str]:
    """A file that `pack` made, and the SHA-256 of all its bytes. Raises Damaged, naming what is wrong."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    try:
        if not 0 < size <= _LONGEST_HEADER:
            raise ValueError
        header = orjson.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__")
        body = memoryview(data)[8 + size :]
        tensors = {}
        for name, one in header.items():
            start, end = one["data_offsets"]
            tensors[name] = np.frombuffer(body[start:end], _DTYPES[one["dtype"]]).reshape(one["shape"])
        found = hashlib.sha256(body).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path}: not a safetensors file of ours, or cut off") from None
    if found != metadata.get("sha256"):
        raise Damaged(f"{path}: its tensors' sha256 is not the one in its header")
    return TensorFile(tensors, metadata), hashlib.sha256(data).hexdigest()
