"""Ids to positions in a file, for shards of any size: 24 bytes an entry, where a dict of strings takes 200."""

import hashlib
from array import array
from bisect import bisect_left, bisect_right

import numpy as np


class IdIndex:
    """id -> position of its latest record, 24 bytes an entry. Fill it, then look up.

    A position below 0 takes an id back out.
    """

    def __init__(self) -> None:
        # Highs and lows (the halves of the ids) and positions; from the first lookup on sorted by id, the latest of each.
        self._columns = array("q"), array("q"), array("q")
        self._sorted = True

    def add(self, id: str, position: int) -> None:
        for column, value in zip(self._columns, (*_halves(id), position)):
            column.append(value)
        self._sorted = False

    def _sort(self) -> tuple[array, array, array]:
        if not self._sorted:
            high, low, position = (np.frombuffer(column, np.int64) for column in self._columns)
            # Stable: of equal ids the last one added comes last, and only that one stays.
            order = np.lexsort((low, high))
            last = np.ones(len(order), bool)
            last[:-1] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
            order = order[last & (position[order] >= 0)]
            self._columns = tuple(array("q", column[order].tobytes()) for column in (high, low, position))
            self._sorted = True
        return self._columns

    def get(self, id: str) -> int | None:
        """Position of the latest record of `id`."""
        if not self._sorted:
            self._sort()
        return self._find(*_halves(id)) if self._columns[0] else None

    def _find(self, high: int, low: int) -> int | None:
        highs, lows, positions = self._columns
        first = bisect_left(highs, high)
        at = bisect_left(lows, low, first, bisect_right(highs, high, first))
        if at < len(highs) and highs[at] == high and lows[at] == low:
            return positions[at]
        return None

    def __contains__(self, id: str) -> bool:
        return self.get(id) is not None

    def __len__(self) -> int:
        return len(self._sort()[0])

    def missing_in(self, other: "IdIndex") -> int:
        """How many of these ids `other` does not have."""
        highs, lows, _ = self._sort()
        other._sort()
        return sum(other._find(high, low) is None for high, low in zip(highs, lows))

    def positions(self) -> list[int]:
        """All positions, ascending."""
        return sorted(self._sort()[2])


def _halves(id: str) -> tuple[int, int]:
    """128 bits of an id as two signed integers."""
    try:
        raw = bytes.fromhex(id)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raw = hashlib.blake2b(id.encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "little", signed=True), int.from_bytes(raw[8:], "little", signed=True)
