"""Bytes to raw rows: JSON Lines, JSON, CSV, TSV, Parquet, Arrow and plain text, one row in memory at a time.

The kind is read from the file's name, compression (gzip, zstd, bzip2, xz) from its first bytes.
A row that can't be read is yielded with its defect; a file that can't be read on, or isn't what its name says, raises
UserError, since nobody could tell how many rows are lost.
"""

import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.compression import COMPRESSIONS, Members, is_compressed
from scripts.lib.prompts.sources.disguises import HEAD_BYTES, disguise
from scripts.lib.prompts.sources.row import CHUNK_BYTES, Row
from scripts.lib.prompts.sources.table_rows import comma_separated, tab_separated
from scripts.lib.prompts.sources.text_rows import json_lines, json_values, texts

KINDS = {
    "jsonl": "lines", "ndjson": "lines", "json": "json", "csv": "csv", "tsv": "tsv", "txt": "text",
    "parquet": "parquet", "pq": "parquet", "arrow": "arrow", "feather": "arrow",
}  # fmt: skip
MOST_LAYERS = 3  # of compression: there are archives that hold themselves
_TEXT_READERS: dict[str, Callable[[str, io.BufferedReader], Iterator[Row]]] = {
    "lines": json_lines, "json": json_values, "csv": comma_separated, "tsv": tab_separated, "text": texts,
}  # fmt: skip


def kind_of(name: str) -> str | None:
    """`lines | json | csv | tsv | text | parquet | arrow` by a file's name; None when it is no data file."""
    parts, _ = _endings(name)
    return KINDS.get(parts[-1]) if len(parts) > 1 else None


def _endings(name: str) -> tuple[list[str], bool]:
    """(the parts of a file's name without compressions, whether there were any)."""
    parts = name.lower().rsplit("/", 1)[-1].split(".")
    count = len(parts)
    while len(parts) > 1 and parts[-1] in COMPRESSIONS:
        parts.pop()
    return parts, len(parts) < count


def read_file(name: str, open_file: Callable[[], BinaryIO]) -> Iterator[Row]:
    """Yield the rows of one file. Raises UserError naming the file (and row) when it can't be read on, or as a whole."""
    kind = kind_of(name)
    if kind is None:
        raise UserError(f"{name}: unknown kind of file; known endings: {', '.join(KINDS)} (also .gz, .zst, .bz2, .xz)")
    try:
        with open_file() as raw:
            if kind in ("parquet", "arrow"):
                yield from _readable(name, _columnar(kind)(name, raw), may_be_empty=True)
            else:
                rows = _TEXT_READERS[kind](name, content(name, kind, raw))
                yield from _readable(name, rows, may_be_empty=False)
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{name}: can't be read: {' '.join(str(error).split()) or type(error).__name__}") from None


def _columnar(kind: str) -> Callable[[str, BinaryIO], Iterator[Row]]:
    from scripts.lib.prompts.sources import arrow_rows  # the workflow plans without Arrow

    return arrow_rows.parquet if kind == "parquet" else arrow_rows.arrow


def content(name: str, kind: str, raw: BinaryIO) -> io.BufferedReader:
    """What a text file holds, unpacked. Raises UserError when it is not what its name says."""
    stream: io.BufferedReader[Any] = io.BufferedReader(cast(io.RawIOBase, raw), CHUNK_BYTES)
    layers = 0
    while is_compressed(head := stream.peek(HEAD_BYTES)) and layers < MOST_LAYERS:
        stream = io.BufferedReader(Members(stream), CHUNK_BYTES)
        layers += 1
    if found := disguise(head, kind):
        raise UserError(f"{name}: {found}")
    if head and not layers and _endings(name)[1]:
        raise UserError(f"{name}: is not compressed, though its name says so: rename it, or fetch it again")
    return stream


def _readable(name: str, rows: Iterator[Row], may_be_empty: bool) -> Iterator[Row]:
    """The rows. Raises UserError at the end when none could be read, or there are none and nothing in the file says so."""
    first: Row | None = None
    readable = False
    for row in rows:
        first = first or row
        readable = readable or isinstance(row.value, dict | list | str)
        yield row
    if readable or (first is None and may_be_empty):
        return
    if first is None:
        raise UserError(f"{name}: holds no rows: was it cut short? Fetch it again, or leave it out of `source`")
    why = f"{first.defect.reason}: {first.defect.detail}" if first.defect else "no object, list or text"
    raise UserError(
        f"{name}: none of its rows can be read ({first.where}: {why}): it is not what its name says, or broken: "
        "fetch it again, or leave it out of `source`"
    )
