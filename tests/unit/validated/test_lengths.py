"""Lengths of many rows are exact, however they come and are added up."""

import math
import statistics as stdlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.validated.lengths import Lengths

some_lengths = st.lists(st.integers(0, 3000), max_size=60)


def lengths(values: list[int]) -> Lengths:
    made = Lengths()
    made.add(np.asarray(values, np.int64))
    return made


@settings(deadline=None)
@given(some_lengths, some_lengths)
def test_lengths_are_exact_and_add_up(first, second):
    both = lengths(first)
    both.merge(lengths(second))
    everything = sorted(first + second)
    assert both.rows == len(everything)
    assert both.tokens == sum(everything)
    assert both.deviation == pytest.approx(np.std(everything) if everything else 0.0, abs=1e-6)
    for share in (0.1, 0.5, 0.9, 0.99, 1.0):
        expected = everything[max(1, math.ceil(round(share * len(everything), 9))) - 1] if everything else None
        assert both.quantile(share) == expected


@settings(deadline=None)
@given(some_lengths)
def test_a_histogram_holds_the_same_lengths(values):
    histogram = {str(value): values.count(value) for value in set(values)}
    assert Lengths.of(histogram).counts.tolist() == lengths(values).counts.tolist()


def test_merging_leaves_the_other_as_it_was():
    short, long = lengths([1]), lengths([1, 5])
    long.merge(short)
    short.merge(long)
    assert long.counts.tolist() == [0, 2, 0, 0, 0, 1]
    assert short.counts.tolist() == [0, 3, 0, 0, 0, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1))
def test_every_row_is_in_one_bin(values):
    edges = 2.0 ** np.arange(2, 11)
    assert lengths(values).binned(edges).sum() == pytest.approx(1)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=200))
def test_percentiles_are_exact(values: list[int]) -> None:
    got = Lengths.of({str(length): count for length, count in Counter(values).items()}).percentiles()
    ordered = sorted(values)
    assert (got["min"], got["max"]) == (ordered[0], ordered[-1])
    assert got["p50"] == stdlib.median_low(ordered)
    for percent in (50, 90, 95, 99):
        value = got[f"p{percent}"]
        assert sum(length <= value for length in values) >= len(values) * percent / 100
        assert sum(length < value for length in values) < len(values) * percent / 100


def test_no_lengths_have_no_percentiles() -> None:
    assert Lengths().percentiles() == {}
