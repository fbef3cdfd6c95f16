"""Rows of Parquet and Arrow files, a few in memory at a time."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import NotJson
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.columns import features, rows_of
from scripts.lib.prompts.sources.disguises import HEAD_BYTES, disguise
from scripts.lib.prompts.sources.row import BATCH_ROWS, CHUNK_BYTES, Row


def parquet(name: str, raw: BinaryIO) -> Iterator[Row]:
    """Rows of a Parquet file. Raises UserError when it can't be read on."""
    try:
        # Row groups of public datasets reach gigabytes: read them page by page.
        file = pq.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False, arrow_extensions_enabled=True)
        batches = file.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
        yield from _rows(name, file.schema_arrow, batches)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(name, raw, "parquet", error) from None


def arrow(name: str, raw: BinaryIO) -> Iterator[Row]:
    """Rows of Arrow IPC: the file format (Feather) or the stream format (what `datasets` saves)."""
    try:
        magic = raw.read(6)
        raw.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(raw)
            batches: Iterator[Any] = (file.get_batch(index) for index in range(file.num_record_batches))
            schema = file.schema
        else:
            stream = pa.ipc.open_stream(raw)
            batches, schema = iter(stream), stream.schema
        parts = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, batch.num_rows, BATCH_ROWS))
        yield from _rows(name, schema, parts)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(name, raw, "arrow", error) from None


def _rows(name: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    if len(set(schema.names)) != len(schema.names):
        raise UserError(f"{name}: two columns have the same name: {', '.join(schema.names)}")
    known = features(schema)
    number = 0
    for batch in batches:
        for row in _decoded(name, number, batch, known):
            number += 1
            yield row


def _decoded(name: str, before: int, batch: pa.RecordBatch, known: dict[str, Any]) -> Iterator[Row]:
    try:
        values = rows_of(batch, known)
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            yield Row(f"{name}:{before + 1}", None, _defect(error))
            return
        for index in range(batch.num_rows):
            yield from _decoded(name, before + index, batch.slice(index, 1), known)
        return
    for index, value in enumerate(values, before + 1):
        yield Row(f"{name}:{index}", value)


def _defect(error: Exception) -> Defect:
    if isinstance(error, UnicodeDecodeError):
        return Defect("invalid_unicode", "text that is not UTF-8")
    return Defect("broken_json" if isinstance(error, NotJson) else "broken_row", " ".join(str(error).split())[:200])


def _unreadable(name: str, raw: BinaryIO, kind: str, error: Exception) -> Exception:
    raw.seek(0)
    if found := disguise(raw.read(HEAD_BYTES), kind):
        return UserError(f"{name}: {found}")
    if isinstance(error, OSError):  # Arrow's own about the bytes, or of the disk or the network
        return error
    what = {"parquet": "a readable Parquet file", "arrow": "a readable Arrow file"}[kind]
    return UserError(f"{name}: not {what}: {' '.join(str(error).split())[:200]}")
