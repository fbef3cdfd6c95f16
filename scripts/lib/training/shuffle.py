"""A seeded global shuffle with de-duplication by id, in bounded memory: two passes over hash buckets.

Each row gets a 64-bit key, a keyed hash of its id. The first pass spreads the rows over spill files
by the key's top bits, the second sorts one bucket after the other. The result is simply all rows
sorted by (key, id): it depends neither on the order of the inputs nor on the number of buckets.
Rows stay in Arrow buffers all the way.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from scripts.lib.training.keyed_hash import keyed_hash

KEY = "__key"


def order_keys(ids: pa.Array | pa.ChunkedArray, seed: int) -> np.ndarray:
    """The place of each id in the shuffle: uint64, uniform."""
    return _keyed_hash(ids, f"order {seed}")


def share_keys(ids: pa.Array | pa.ChunkedArray, seed: int) -> np.ndarray:
    """uint64, uniform and independent of `order_keys`: an id belongs to a share w if its key < w * 2**64."""
    return _keyed_hash(ids, f"share {seed}")


def subset_keys(ids: pa.Array | pa.ChunkedArray, seed: int) -> np.ndarray:
    """uint64, uniform and independent of the others: the smallest ones are a random part of the ids."""
    return _keyed_hash(ids, f"subset {seed}")


def _keyed_hash(ids: pa.Array | pa.ChunkedArray, purpose: str) -> np.ndarray:
    return keyed_hash(ids, hashlib.sha256(purpose.encode()).hexdigest()[:16].encode())


def ahead(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items; the next one is made in a thread while the caller works on this one."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item


class Buckets:
    """Spill files of the first pass, one for each stretch of keys.

    Rows must be added oldest first: of equal ids, the one added last wins.
    """

    def __init__(self, directory: Path, schema: pa.Schema, count: int, seed: int) -> None:
        """`count` is rounded up to a power of two, so that a bucket is the key's top bits."""
        self._bits = max(0, (count - 1).bit_length())
        self._seed = seed
        self._schema = schema.append(pa.field(KEY, pa.uint64(), nullable=False))
        self._files = contextlib.ExitStack()
        # Not compressed: lz4 saves a quarter of the space and costs more time than reading a file twice.
        self._paths = [directory / f"bucket-{number:05d}.arrow" for number in range(1 << self._bits)]
        self._writers = []
        for path in self._paths:
            sink = self._files.enter_context(pa.OSFile(str(path), "wb"))
            self._writers.append(self._files.enter_context(pa.ipc.new_stream(sink, self._schema)))

    def add(self, batch: pa.RecordBatch) -> None:
        """Spill the rows of a batch."""
        keys = order_keys(batch["id"], self._seed)
        number = keys >> np.uint64(64 - self._bits) if self._bits else np.zeros(len(keys), np.uint64)
        order = np.argsort(number, kind="stable")
        rows = pa.RecordBatch.from_arrays([*batch.columns, pa.array(keys)], schema=self._schema).take(pa.array(order))
        bounds = np.searchsorted(number[order], np.arange(len(self._writers) + 1, dtype=np.uint64))
        for writer, start, end in zip(self._writers, bounds[:-1].tolist(), bounds[1:].tolist()):
            if end > start:
                writer.write_batch(rows.slice(start, end - start))

    def sorted(self) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield `(kept, superseded)` per bucket, in key order; each spill file is deleted once it is read.

        The next bucket is read and sorted while the caller works on this one, so memory holds two.
        """
        self.close()
        return ahead(_sort_bucket(path) for path in self._paths)

    def close(self) -> None:
        """Finish the spill files."""
        self._files.close()


def _sort_bucket(path: Path) -> tuple[pa.Table, pa.Table]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    path.unlink()
    position = np.arange(len(table))
    ids = table["id"].combine_chunks()
    order = pa.table({"key": table[KEY], "id": ids, "position": position}).sort_by(
        [("key", "ascending"), ("id", "ascending"), ("position", "descending")]
    )
    in_order = order["id"].combine_chunks()
    newest = np.ones(len(table), bool)
    if len(table) > 1:
        newest[1:] = pa.compute.not_equal(in_order[1:], in_order[:-1]).to_numpy(zero_copy_only=False)
    position = order["position"].to_numpy()
    superseded = table.select(["id", "dataset"]).take(pa.array(position[~newest]))
    # One chunk first: taking from many chunks is three times slower.
    kept = table.drop_columns([KEY]).combine_chunks().take(pa.array(position[newest]))
    return kept, superseded
