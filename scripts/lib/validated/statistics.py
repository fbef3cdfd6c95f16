"""What a shard of samples looks like in numbers, in a form that adds up over shards.

Counts are exact and addable: lengths are kept as a histogram of every length that occurs, so percentiles over all
shards are exact as well.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.lib.core import durable, records
from scripts.lib.core.records import Sample
from scripts.lib.target.model import Target
from scripts.lib.target.output import thought_length


class Statistics:
    """Sums over samples."""

    def __init__(self, target: Target):
        self._target = target
        self.samples = self.tokens = self.supervised_tokens = self.thinking_samples = 0
        self.reasoning_tokens = self.multi_turn_samples = 0
        self.lengths: Counter[int] = Counter()
        self.supervised_lengths: Counter[int] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.ids_origin: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        mask = np.asarray(sample.loss_mask, dtype=np.int8)
        supervised = int(mask.sum())
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.supervised_tokens += supervised
        self.lengths[len(sample.input_ids)] += 1
        self.supervised_lengths[supervised] += 1
        self.outcomes[sample.outcome] += 1
        self.ids_origin[sample.ids_origin] += 1
        self.flags.update(sample.flags)
        starts = np.flatnonzero(np.diff(np.concatenate(([0], mask))) == 1)
        self.multi_turn_samples += len(starts) > 1
        thought = self._thought(np.asarray(sample.input_ids), mask, starts, sample)
        self.thinking_samples += thought > 0
        self.reasoning_tokens += thought

    def _thought(self, ids: np.ndarray, mask: np.ndarray, starts: np.ndarray, sample: Sample) -> int:
        """Supervised tokens of thoughts: from the start of an answer to its closing tag, or all of an unclosed one."""
        if self._target.think_tags is None:
            return 0
        total = 0
        ends = np.flatnonzero(np.diff(np.concatenate((mask, [0]))) == -1) + 1
        for start, end in zip(starts, ends):
            closed = thought_length(self._target, ids[start:end].tolist())
            if closed:
                total += closed
            elif end == ends[-1] and "reasoning_only" in sample.flags:
                total += int(end - start)
        return total

    def as_dict(self) -> dict[str, Any]:
        """JSON values, in a fixed order."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "thinking_samples": self.thinking_samples,
            "multi_turn_samples": self.multi_turn_samples,
            "outcomes": _ordered(self.outcomes),
            "ids_origin": _ordered(self.ids_origin),
            "flags": _ordered(self.flags),
            "lengths": {str(length): count for length, count in sorted(self.lengths.items())},
            "supervised_lengths": {str(length): count for length, count in sorted(self.supervised_lengths.items())},
        }


def _ordered(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items()))


def add_up(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of nested dicts of numbers; keys keep the order in which they first come."""
    total: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                total[key] = add_up([total.get(key, {}), value])
            else:
                total[key] = total.get(key, 0) + value
    return total


TOKEN_FREQUENCY_SCHEMA = pa.schema(
    [
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),  # in all positions
        pa.field(
            "supervised", pa.int64(), nullable=False
        ),  # where the loss is taken: what a draft vocabulary is cut by
    ]
)


def write_token_frequencies(path: Path, shards: Iterable[Path], vocab_size: int, provenance: dict) -> None:
    """Count every id of the vocabulary over validated shards, one row per id, ids without a sample included.

    EAGLE-3's reduced draft vocabulary (d2t, t2d) is the most frequent supervised ids.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    supervised = np.zeros(vocab_size, dtype=np.int64)
    for shard in shards:
        with records.open_parquet(shard) as file:
            for batch in records.batches(file, ["input_ids", "loss_mask"]):
                ids = batch.column("input_ids").flatten().to_numpy()
                mask = batch.column("loss_mask").flatten().to_numpy()
                counts += np.bincount(ids, minlength=vocab_size)
                supervised += np.bincount(ids[mask == 1], minlength=vocab_size)
    table = pa.table(
        [pa.array(np.arange(vocab_size, dtype=np.int32)), pa.array(counts), pa.array(supervised)],
        schema=records.with_provenance(TOKEN_FREQUENCY_SCHEMA, provenance),
    )
    with durable.replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
