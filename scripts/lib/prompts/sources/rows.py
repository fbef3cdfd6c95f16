"""Bytes to raw rows: JSON Lines, JSON, CSV, TSV, Parquet, Arrow and plain text, one row in memory at a time.

The kind is read from the file's name, compression (gzip, zstd, bzip2, xz) from its first bytes.
A row that can't be read is yielded with its defect; a file that can't be read on raises UserError, since nobody
could tell how many rows are lost.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import NotJson, read_json
from scripts.lib.prompts.defects import Defect

# Far beyond any prompt; what keeps a file without line breaks from filling the memory.
MAX_ROW_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
BATCH_ROWS = 128

KINDS = {
    "jsonl": "lines", "ndjson": "lines", "json": "json", "csv": "csv", "tsv": "tsv", "txt": "text",
    "parquet": "parquet", "pq": "parquet", "arrow": "arrow", "feather": "arrow",
}  # fmt: skip
COMPRESSIONS = ("gz", "gzip", "zst", "zstd", "bz2", "xz")


@dataclass(slots=True)
class Row:
    """One row of a source. `value` is what JSON or Arrow gave; None when `defect` says why it can't be read."""

    where: str  # "file:row"; row is the line of text files, the number from 1 of others
    value: Any
    defect: Defect | None = None


def kind_of(name: str) -> str | None:
    """`lines | json | csv | tsv | text | parquet | arrow` by a file's name; None when it is no data file."""
    parts = name.lower().rsplit("/", 1)[-1].split(".")
    while len(parts) > 1 and parts[-1] in COMPRESSIONS:
        parts.pop()
    return KINDS.get(parts[-1]) if len(parts) > 1 else None


def read_file(name: str, open_file: Callable[[], BinaryIO]) -> Iterator[Row]:
    """Yield the rows of one file. Raises UserError naming the file (and row) when it can't be read on."""
    kind = kind_of(name)
    if kind is None:
        raise UserError(f"{name}: unknown kind of file; known endings: {', '.join(KINDS)} (also .gz, .zst, .bz2, .xz)")
    try:
        with open_file() as raw:
            if kind in ("parquet", "arrow"):
                yield from (_parquet if kind == "parquet" else _arrow)(name, raw)
            else:
                yield from _TEXT_READERS[kind](name, io.BufferedReader(decompressed(raw), CHUNK_BYTES))
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{name}: can't be read: {' '.join(str(error).split()) or type(error).__name__}") from None


def decompressed(raw: BinaryIO) -> Any:
    """`raw` itself, or a stream of what it holds compressed."""
    raw = io.BufferedReader(raw, CHUNK_BYTES) if not hasattr(raw, "peek") else raw  # type: ignore[arg-type]
    magic = raw.peek(6)[:6]
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import zstandard

        return _Zstandard(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.LZMAFile(raw)
    return raw


class _Zstandard(io.RawIOBase):
    """A zstd stream whose errors are OSError, like those of the other compressions."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        try:
            return self._stream.readinto(buffer)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text. Raises Defect `broken_json`."""
    try:
        return read_json(data)
    except NotJson as error:
        raise Defect("broken_json", str(error)) from None


def _lines(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """Lines end at LF only: U+2028 and friends inside strings are text."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        where = f"{name}:{number}"
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Row(where, None, Defect("row_too_large", f"more than {MAX_ROW_BYTES >> 20} MiB"))
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.strip()
        if not line:
            continue
        try:
            yield Row(where, parse_json(line))
        except Defect as defect:
            yield Row(where, None, defect)


def _json(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """A JSON array of rows, one object, or JSON Lines in spite of the name."""
    head = stream.peek(CHUNK_BYTES)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        first, newline, _ = start.partition(b"\n")
        try:
            one_per_line = bool(newline) and isinstance(parse_json(first.strip()), dict)
        except Defect:
            one_per_line = False
        if one_per_line or not start:
            yield from _lines(name, stream)
            return
    for number, value in enumerate(_values(name, io.TextIOWrapper(stream, "utf-8-sig")), 1):
        yield Row(f"{name}:{number}", value)


def _values(name: str, text: io.TextIOWrapper) -> Iterator[Any]:
    """Values of a JSON array, or values one after the other, decoded as they arrive."""
    decode = json.JSONDecoder().raw_decode
    buffer, position, ended, count, depth = "", 0, False, 0, 0
    wanted = CHUNK_BYTES

    def fail(problem: str) -> UserError:
        return UserError(f"{name}:{count + 1}: {problem}: the file is broken from here on, mend it")

    while True:
        while position < len(buffer) and (buffer[position].isspace() or buffer[position] == ","):
            position += 1
        if position < len(buffer) and depth == 0 and count == 0 and buffer[position] == "[":
            depth, position = 1, position + 1
            continue
        if position < len(buffer) and depth == 1 and buffer[position] == "]":
            return
        problem = ""
        if position < len(buffer):
            try:
                value, end = decode(buffer, position)
                # A number may go on in the next chunk; an object or a string ends with itself.
                if end < len(buffer) or ended or buffer[end - 1] in '}"]':
                    yield value
                    count += 1
                    position = end
                    wanted = CHUNK_BYTES
                    continue
            except json.JSONDecodeError as error:
                problem = f"not JSON ({error.msg})"
            except RecursionError:
                raise fail("nested too deeply") from None
        if ended:
            if position < len(buffer):
                raise fail(problem)
            if depth:
                raise fail("the array never closes")
            return
        if len(buffer) - position > MAX_ROW_BYTES:
            raise fail(problem or f"a row of more than {MAX_ROW_BYTES >> 20} MiB")
        try:
            chunk = text.read(wanted)
        except UnicodeDecodeError as error:
            raise fail(f"not UTF-8 ({error.reason})") from None
        ended = not chunk
        buffer, position = buffer[position:] + chunk, 0
        # A row that is longer than what was read is decoded again from its start: read twice as much each time.
        wanted = min(2 * wanted, MAX_ROW_BYTES)


def _table(name: str, stream: io.BufferedReader, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, MAX_ROW_BYTES))
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        where = f"{name}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # The parser has lost the row's end: what follows could be read as anything.
            raise UserError(f"{where}: not readable as a table: {error}: the file is broken from here on") from None
        if not cells:
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if len(set(header)) != len(header):
                raise UserError(f"{where}: two columns have the same name: {', '.join(header)}")
        elif len(cells) != len(header):
            detail = f"{len(cells)} cells, {len(header)} columns"
            yield Row(where, None, Defect("broken_row", detail))
        else:
            yield Row(where, dict(zip(header, cells)))


def _csv(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    return _table(name, stream, ",")


def _tsv(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    return _table(name, stream, "\t")


def _text(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    for number in itertools.count(1):
        line = stream.readline(MAX_ROW_BYTES)
        if not line:
            return
        if line.strip():
            text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            yield Row(f"{name}:{number}", {"text": text})


_TEXT_READERS = {"lines": _lines, "json": _json, "csv": _csv, "tsv": _tsv, "text": _text}


def _parquet(name: str, raw: BinaryIO) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Row groups of public datasets reach gigabytes: read them page by page.
        file = pq.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False)
        number = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
            for row in _decoded(name, number, batch):
                number += 1
                yield row
    except pa.ArrowException as error:
        raise UserError(f"{name}: not a readable Parquet file: {' '.join(str(error).split())[:200]}") from None


def _arrow(name: str, raw: BinaryIO) -> Iterator[Row]:
    """Arrow IPC: the file format (Feather) or the stream format (what `datasets` saves)."""
    import pyarrow as pa

    try:
        magic = raw.read(6)
        raw.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(raw)
            batches: Any = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            batches = pa.ipc.open_stream(raw)
        number = 0
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in _decoded(name, number, batch.slice(start, BATCH_ROWS)):
                    number += 1
                    yield row
    except pa.ArrowException as error:
        raise UserError(f"{name}: not a readable Arrow file: {' '.join(str(error).split())[:200]}") from None


def _decoded(name: str, before: int, batch: Any) -> Iterator[Row]:
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            where = f"{name}:{before + index + 1}"
            try:
                yield Row(where, batch.slice(index, 1).to_pylist()[0])
            except UnicodeDecodeError:
                yield Row(where, None, Defect("invalid_unicode", "text that is not UTF-8"))
        return
    for index, value in enumerate(values, before + 1):
        yield Row(f"{name}:{index}", value)
