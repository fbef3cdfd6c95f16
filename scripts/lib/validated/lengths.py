"""Token counts of many rows as one exact histogram: addable, in memory that depends on the longest row only."""

from collections.abc import Mapping

import numpy as np

PERCENTILES = (50, 90, 95, 99)


class Lengths:
    """How many rows have each length. Lengths are whole numbers of tokens, 0 and up."""

    def __init__(self) -> None:
        self.counts = np.zeros(0, np.int64)

    @classmethod
    def of(cls, histogram: Mapping[str, int]) -> "Lengths":
        """From `{"length": rows}`, the form in which validation keeps it."""
        made = cls()
        if histogram:
            made.counts = np.zeros(max(map(int, histogram)) + 1, np.int64)
            for length, rows in histogram.items():
                made.counts[int(length)] += rows
        return made

    def add(self, lengths: np.ndarray) -> None:
        """Count the lengths of some rows."""
        self._add_counts(np.bincount(lengths))

    def merge(self, other: "Lengths") -> None:
        """Count all rows of another one."""
        self._add_counts(other.counts)

    def _add_counts(self, counts: np.ndarray) -> None:
        longer, shorter = sorted((self.counts, counts), key=len, reverse=True)
        self.counts = longer.astype(np.int64)  # a copy: `other` keeps its own
        self.counts[: len(shorter)] += shorter

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.counts @ np.arange(len(self.counts)))

    @property
    def mean(self) -> float | None:
        """None without rows."""
        return self.tokens / self.rows if self.rows else None

    @property
    def deviation(self) -> float:
        """Standard deviation of the lengths; 0 without rows."""
        if not self.rows:
            return 0.0
        squares = float(self.counts @ np.square(np.arange(len(self.counts), dtype=np.float64)))
        return max(0.0, squares / self.rows - (self.tokens / self.rows) ** 2) ** 0.5

    def quantile(self, share: float) -> int | None:
        """The length that `share` of the rows don't exceed (nearest rank); None without rows."""
        if not self.rows:
            return None
        rank = max(1, int(np.ceil(round(share * self.rows, 6))))
        return int(np.searchsorted(np.cumsum(self.counts), rank))

    def percentiles(self) -> dict[str, int]:
        """min, p50, ..., max (nearest rank); {} without rows."""
        shares = {"min": 0.0, **{f"p{percent}": percent / 100 for percent in PERCENTILES}, "max": 1.0}
        found = {name: self.quantile(share) for name, share in shares.items()}
        return {name: length for name, length in found.items() if length is not None}

    def binned(self, edges: np.ndarray) -> np.ndarray:
        """Share of the rows in each bin [edges[i], edges[i + 1]); lengths below the first edge go into the first bin."""
        present = np.flatnonzero(self.counts)
        bins = np.clip(np.searchsorted(edges, present, side="right") - 1, 0, len(edges) - 2)
        return np.bincount(bins, self.counts[present], len(edges) - 1) / max(1, self.rows)
