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
from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.core.records import Sample
from scripts.lib.prompts.sources.folders import files_below
from scripts.lib.training import manifest
from scripts.lib.training.base_gates import NO_JSON, NULL, BaseGates, Limits, Tokens, rows_with

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
    ours = _manifest_of_ours(folder)
    paths = _paths(folder, ours)
    if not paths:
        raise UserError(f"merge.base: {folder}: holds no .parquet file")
    recorded = {part.sha256 for part in ours.parts} if ours else set()
    sources = []
    for path in paths:
        source = _describe(path, str(path.relative_to(folder)), "base")
        if ours and source.sha256 not in recorded:
            raise UserError(f"{path}: its sha256 differs from the manifest's: the base corpus is damaged")
        names = _names(source)
        for column in ("input_ids", "loss_mask"):
            if column not in names:
                raise UserError(f"{path}: has no column `{column}`, it has {', '.join(names)}")
        source.ignored_columns = [name for name in names if name not in records.SAMPLE_SCHEMA.names]
        sources.append(source)
    return sources


def _manifest_of_ours(folder: Path) -> manifest.Manifest | None:
    """The manifest of a corpus of ours, or of its `datasets` export; None in a folder of others, whatever they call so."""
    path = folder / manifest.MANIFEST
    if not path.is_file() or not {"schema_version", "parts"} <= durable.read_json(path).keys():
        return None
    return manifest.read_manifest(folder)


def _paths(folder: Path, ours: manifest.Manifest | None) -> list[Path]:
    """The Parquet files of a base. Rejects of a validation are none: they failed its gates."""
    if ours and (folder / ours.parts[0].file).exists():
        return [folder / part.file for part in ours.parts]
    below = [Path(path) for path in files_below(str(folder)) if path.endswith(".parquet")]
    paths = [path for path in below if not path.name.endswith(".rejects.parquet")]
    if ours and len(paths) != len(ours.parts):
        raise UserError(
            f"merge.base: {folder}: holds {len(paths)} of the {len(ours.parts)} parts of its manifest: "
            "the base corpus is damaged"
        )
    return paths


_ADVICE = {"shard": "delete it and run again", "base": "mend it, or take it out of the base"}


def _describe(path: Path, name: str, kind: str) -> MergedFile:
    with records.open_parquet(path, _ADVICE[kind]) as file:
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


def batches(source: MergedFile, gates: BaseGates | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file as batches of SAMPLE_SCHEMA of about BATCH_BYTES.

    `gates` leave out rows of a base and count them (shards were validated). Raises UserError naming a column of a
    base that can't be read as ours.
    """
    columns = [name for name in records.SAMPLE_SCHEMA.names if name in _names(source)]
    gates = gates or BaseGates(Limits())
    first = 0
    with records.open_parquet(source.path, _ADVICE[source.kind]) as file:
        for batch in _raw_batches(file, source, columns):
            yield (
                _as_samples(batch, source.path, first, gates)
                if source.kind == "base"
                else records.in_schema(batch, records.SAMPLE_SCHEMA)
            )
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
    with records.open_parquet(source.path, _ADVICE[source.kind]) as file:
        return file.schema_arrow.names


def _as_samples(batch: pa.RecordBatch, path: Path, first: int, gates: BaseGates) -> pa.RecordBatch:
    """The base rows that the gates let in, in SAMPLE_SCHEMA: columns cast to ours, missing ones filled in."""
    names = _cast(batch, "dataset", path) or pa.nulls(len(batch), pa.string())
    names = pc.fill_null(names, FOREIGN_DATASET)
    # Wide first: what doesn't fit is a row to refuse, not a file.
    wide = {name: _integers(batch, name, path) for name in ("input_ids", "loss_mask")}
    keep = gates.keep(
        Tokens(wide["input_ids"], wide["loss_mask"]),
        names.to_pylist(),
        lambda row: f"{path}:{first + row}",
        _unfit(batch, path),
    )
    kept = pa.array(keep)
    batch = batch.filter(kept)
    columns = {
        name: array.filter(kept).cast(records.SAMPLE_SCHEMA.field(name).type)
        for name, array in {**wide, "dataset": names}.items()
    }
    for name in batch.schema.names:
        if name not in columns:
            columns[name] = _cast(batch, name, path)
    # A row without an id is known by its tokens, never by its position.
    columns.setdefault("id", pa.array(_content_ids(columns["input_ids"], columns["loss_mask"]), pa.string()))
    columns.setdefault("prompt_id", columns["id"])
    return pa.RecordBatch.from_arrays(
        [_filled(columns.get(column.name), column, len(batch)) for column in records.SAMPLE_SCHEMA],
        schema=records.SAMPLE_SCHEMA,
    )


def _unfit(batch: pa.RecordBatch, path: Path) -> dict[str, np.ndarray]:
    """Which rows hold what no sample of ours can, beside their tokens, by the check that says so."""
    null, no_json = np.zeros(len(batch), bool), np.zeros(len(batch), bool)
    for name in batch.schema.names:
        if name in ("id", "prompt_id"):
            null |= pc.is_null(batch[name]).to_numpy(zero_copy_only=False)
        elif name in ("messages", "flags"):
            null |= _hold_nulls(batch[name])
        elif name in ("tools", "template_kwargs"):
            texts = _cast(batch, name, path)
            odd = pa.array([text for text in pc.unique(texts).to_pylist() if not _is_json(text)], pa.string())
            no_json |= pc.is_in(texts, odd).to_numpy(zero_copy_only=False)
    return {NULL: null, NO_JSON: no_json}


def _hold_nulls(column: pa.Array) -> np.ndarray:
    """Rows whose list has an element that is null, or a message without role or content."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return np.zeros(len(column), bool)  # the cast says what it is
    values = pc.list_flatten(column)
    null = pc.is_null(values)
    if pa.types.is_struct(values.type):
        for name in {"role", "content"} & {field.name for field in values.type}:
            null = pc.or_(null, pc.is_null(pc.struct_field(values, name)))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return rows_with(np.flatnonzero(null.to_numpy(zero_copy_only=False)), lengths) > 0


def _is_json(text: str | None) -> bool:
    try:
        return text is None or isinstance(parse_json(text), list | dict)
    except NotJson:
        return False


def _integers(batch: pa.RecordBatch, name: str, path: Path) -> pa.Array:
    ours = records.SAMPLE_SCHEMA.field(name).type
    return batch[name] if batch[name].type == ours else _cast(batch, name, path, pa.list_(pa.int64()))


def _cast(batch: pa.RecordBatch, name: str, path: Path, kind: pa.DataType | None = None) -> pa.Array | None:
    """A column as `kind`, else as ours; None when there is none. Raises UserError when it can't be."""
    if name not in batch.schema.names:
        return None
    kind, values = kind or records.SAMPLE_SCHEMA.field(name).type, batch[name]
    try:
        if name == "loss_mask" and pa.types.is_boolean(values.type.value_type):
            values = values.cast(pa.list_(pa.int8()))
        return records.in_type(values, kind).cast(kind)
    except (pa.ArrowException, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: column `{name}` of type {batch[name].type} is no {kind}: {reason}") from None


_FILLING: dict[str, Any] = {"ids_origin": "given", "outcome": "kept", "messages": [], "flags": []}


def _filled(array: pa.Array | None, column: pa.Field, rows: int) -> pa.Array:
    """The column, with what stands for its missing values."""
    filling = pa.scalar(_FILLING.get(column.name), column.type)
    if array is None:  # pyarrow repeats no list no times
        return pa.repeat(filling, rows) if rows else pa.array([], column.type)
    return pc.if_else(pc.is_null(array), filling, array) if array.null_count and not column.nullable else array


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
