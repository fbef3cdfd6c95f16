"""Rows and tokens of samples, counted by the column."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

COUNTED = ("rows", "tokens", "supervised_tokens")


def tokens_per_row(rows: pa.Table | pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and supervised tokens of each row, int64."""
    lengths = pc.list_value_length(rows["input_ids"]).to_numpy(zero_copy_only=False).astype(np.int64)
    mask_lengths = pc.list_value_length(rows["loss_mask"]).to_numpy(zero_copy_only=False).astype(np.int64)
    mask = pc.list_flatten(rows["loss_mask"]).to_numpy(zero_copy_only=False)
    sums = np.zeros(len(lengths), np.int64)
    filled = mask_lengths > 0  # reduceat gives a neighbour's value for an empty stretch
    if filled.any():
        starts = (np.cumsum(mask_lengths) - mask_lengths)[filled]
        sums[filled] = np.add.reduceat(mask, starts, dtype=np.int64)
    return lengths, sums


def per_dataset(
    rows: pa.Table | pa.RecordBatch, lengths: np.ndarray, sums: np.ndarray
) -> Iterator[tuple[str, dict[str, int]]]:
    """`(dataset, {rows, tokens, supervised_tokens})` for each dataset in these rows."""
    counts = (
        pa.table({"dataset": rows["dataset"], "tokens": lengths, "supervised": sums})
        .group_by("dataset")
        .aggregate([([], "count_all"), ("tokens", "sum"), ("supervised", "sum")])
    )
    for row in counts.to_pylist():
        sizes = (row["count_all"], row["tokens_sum"], row["supervised_sum"])
        yield row["dataset"], dict(zip(COUNTED, sizes))


def labels(rows: pa.Table | pa.RecordBatch, column: str) -> Iterator[tuple[str, str, int]]:
    """`(dataset, value, rows)` for each value of a text column in these rows."""
    pairs = pa.table({"dataset": rows["dataset"], "value": rows[column]})
    for row in pairs.group_by(["dataset", "value"]).aggregate([([], "count_all")]).to_pylist():
        yield row["dataset"], row["value"], row["count_all"]
