"""Files that go into a merge: validated shards of ours, and the Parquet files of a base corpus of anyone."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.lib.core import durable, records
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Sample
from scripts.lib.training import manifest

BATCH_BYTES = 16 << 20  # Arrow bytes of one batch: what is in memory while a file is read
FOREIGN_DATASET = "base"  # dataset name of base rows that have none


@dataclass(slots=True)
class MergedFile:
    """One Parquet file to merge, and what its footer tells."""

    path: Path
    name: str  # without the folders above it, so that moving the results changes nothing
    kind: str  # base | shard
    sha256: str
    rows: int
    memory: int  # estimated bytes of all rows in Arrow buffers
    provenance: dict[str, Any]
    ignored_columns: list[str] = field(default_factory=list)


def validated_shard(path: Path) -> MergedFile:
    """Describe a validated shard. Raises UserError when it isn't one."""
    source = _describe(path, f"{path.parent.name}/{path.name}", "shard")
    with records.open_parquet(path) as file:
        if records.columns_of(Sample, file.schema_arrow) != file.schema_arrow.names:
            raise UserError(f"{path}: is not a shard of samples: make it anew with validate_tokens")
    return source


def base_files(folder: Path) -> list[MergedFile]:
    """Describe the files of a base corpus, in a fixed order: a corpus of ours, or any Parquet files.

    Files of others need `input_ids` and `loss_mask`; columns with the names of ours are taken, others
    are left out and named. Raises UserError for a folder without Parquet files, a file without these
    columns, and a corpus of ours whose bytes differ from its manifest.
    """
    if not folder.is_dir():
        raise UserError(f"merge.base: {folder}: no such folder")
    recorded: dict[str, str] = {}
    if (folder / manifest.MANIFEST).is_file():
        recorded = {part.file: part.sha256 for part in manifest.read_manifest(folder).parts}
        paths = [folder / name for name in recorded]
    else:
        paths = sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith("."))
    if not paths:
        raise UserError(f"merge.base: {folder}: holds no .parquet file")
    sources = []
    for path in paths:
        source = _describe(path, str(path.relative_to(folder)), "base")
        if source.sha256 != recorded.get(path.name, source.sha256):
            raise UserError(f"{path}: its sha256 differs from the manifest's: the base corpus is damaged")
        with records.open_parquet(path) as file:
            names = file.schema_arrow.names
        for column in ("input_ids", "loss_mask"):
            if column not in names:
                raise UserError(f"{path}: has no column `{column}`, it has {', '.join(names)}")
        source.ignored_columns = [name for name in names if name not in records.SAMPLE_SCHEMA.names]
        sources.append(source)
    return sources


def _describe(path: Path, name: str, kind: str) -> MergedFile:
    with records.open_parquet(path) as file:
        footer = file.metadata
        memory = 0
        for group in range(footer.num_row_groups):
            for index in range(footer.num_columns):
                column = footer.row_group(group).column(index)
                if column.path_in_schema.startswith("input_ids."):
                    memory += column.num_values * 4
                elif column.path_in_schema.startswith("loss_mask."):
                    memory += column.num_values
                else:  # text: the file's dictionary and the offsets of Arrow about cancel out
                    memory += column.total_uncompressed_size + column.num_values * 4
        rows = footer.num_rows
    return MergedFile(path, name, kind, durable.sha256_file(path), rows, memory, records.read_provenance(path))


def batches(source: MergedFile, vocab_size: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file as batches of SAMPLE_SCHEMA of about BATCH_BYTES.

    Raises UserError naming the first base row that is no sample (shards were validated).
    """
    columns = [name for name in records.SAMPLE_SCHEMA.names if name in _names(source)]
    first = 0
    with records.open_parquet(source.path) as file:
        for batch in _raw_batches(file, source, columns):
            if source.kind == "base":
                batch = _as_samples(batch, str(source.path), first)
                for row, problem in manifest.row_problems(batch, vocab_size):
                    raise UserError(f"{source.path}:{first + row}: {problem}")
            yield records.in_schema(batch, records.SAMPLE_SCHEMA)
            first += len(batch)


def _raw_batches(file: pq.ParquetFile, source: MergedFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    rows = max(1, min(8192, BATCH_BYTES * source.rows // max(1, source.memory)))
    if source.memory > 4 * BATCH_BYTES * file.num_row_groups:
        # Huge row groups, which others may write: this way they are decoded bit by bit.
        yield from file.iter_batches(batch_size=rows, columns=columns)
    else:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group, columns=columns).to_batches(max_chunksize=rows)


def _names(source: MergedFile) -> list[str]:
    with records.open_parquet(source.path) as file:
        return file.schema_arrow.names


def _as_samples(batch: pa.RecordBatch, path: str, first: int) -> pa.RecordBatch:
    """Base rows in SAMPLE_SCHEMA: columns cast to ours, missing ones filled in."""
    columns: dict[str, pa.Array] = {}
    for column in records.SAMPLE_SCHEMA:
        if column.name not in batch.schema.names:
            continue
        try:
            values = batch[column.name]
            if column.name == "loss_mask" and pa.types.is_boolean(values.type.value_type):
                values = values.cast(pa.list_(pa.int8()))
            columns[column.name] = records.in_type(values, column.type).cast(column.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{path}: column `{column.name}` of type {batch[column.name].type} is no {column.type}: {reason}"
            ) from None
    for name in ("input_ids", "loss_mask"):
        array = columns[name]
        if array.null_count:
            row = int(np.flatnonzero(pc.is_null(array).to_numpy(zero_copy_only=False))[0])
            raise UserError(f"{path}:{first + row}: `{name}` is null")
        if pc.list_flatten(array).null_count:
            raise UserError(f"{path}: rows {first} to {first + len(batch) - 1}: `{name}` holds a null")
    rows = len(batch)
    # A row without an id is known by its tokens, never by its position.
    columns.setdefault("id", pa.array(_content_ids(columns["input_ids"], columns["loss_mask"]), pa.string()))
    columns.setdefault("prompt_id", columns["id"])
    fill: dict[str, Any] = {"dataset": FOREIGN_DATASET, "ids_origin": "given", "outcome": "kept"}
    fill |= {"tools": None, "template_kwargs": None}
    for name in ("messages", "flags"):
        fill[name] = []
    arrays = []
    for column in records.SAMPLE_SCHEMA:
        array = columns.get(column.name)
        if array is None:
            array = pa.repeat(pa.scalar(fill[column.name], column.type), rows)
        elif array.null_count and not column.nullable:
            if column.name in ("id", "prompt_id"):
                row = int(np.flatnonzero(pc.is_null(array).to_numpy(zero_copy_only=False))[0])
                raise UserError(f"{path}:{first + row}: `{column.name}` is null")
            filler = pa.scalar(fill[column.name], column.type)
            array = pc.if_else(pc.is_null(array), filler, array)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=records.SAMPLE_SCHEMA)


def _content_ids(input_ids: pa.ListArray, loss_mask: pa.ListArray) -> list[str]:
    ids = pc.list_flatten(input_ids).to_numpy()
    mask = pc.list_flatten(loss_mask).to_numpy()
    ends = np.cumsum(pc.list_value_length(input_ids).to_numpy()).tolist()
    mask_ends = np.cumsum(pc.list_value_length(loss_mask).to_numpy()).tolist()
    found = []
    for start, end, mask_start, mask_end in zip([0, *ends], ends, [0, *mask_ends], mask_ends):
        value = hashlib.sha256(ids[start:end])
        value.update(mask[mask_start:mask_end])
        found.append(value.hexdigest()[:32])
    return found
