"""Outcomes: loops found at ids, and one verdict for every kind of answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.completions.outcomes import MAX_PERIOD, MIN_REPEATS, judge, repeating_tail
from scripts.lib.engines.base import Answer
from scripts.lib.target.output import Output

EOS = frozenset({2})


@given(
    st.lists(st.integers(0, 9), max_size=50),
    st.lists(st.integers(10, 99), min_size=1, max_size=MAX_PERIOD, unique=True),
    st.integers(MIN_REPEATS, MIN_REPEATS + 9),
)
def test_a_loop_is_found_with_its_period(before, pattern, repeats):
    period, found = repeating_tail([*before, *pattern * repeats])
    assert period == len(pattern)
    assert found >= repeats


@given(st.lists(st.integers(10, 99), min_size=1, max_size=MAX_PERIOD, unique=True), st.integers(1, MIN_REPEATS - 1))
def test_fewer_repeats_are_no_loop(pattern, repeats):
    assert repeating_tail([1, *pattern * repeats]) is None


def test_a_loop_that_was_left_is_no_loop():
    assert repeating_tail([*[5, 6] * 40, 7, 8, 9]) is None


def test_a_broken_off_pattern_counts_whole_repeats():
    assert repeating_tail([*[5, 6, 7] * 20, 5]) == (3, 20)


def naive(ids, max_period, repeats):
    for period in range(1, max_period + 1):
        needed = period * repeats
        if len(ids) >= needed and ids[-needed:] == ids[-period:] * repeats:
            return period
    return None


@given(st.lists(st.integers(0, 1), max_size=60))
def test_agrees_with_the_definition(ids):
    found = repeating_tail(ids, max_period=4, min_repeats=3)
    assert (found and found[0]) == naive(ids, 4, 3)


TEXT = Output("Paris.", None, True, ())
LOOP = [7, 8] * 30


@pytest.mark.parametrize(
    ("finish", "ids", "output", "outcome", "flags"),
    [
        ("stop", [5, 6, 2], TEXT, "ok", []),
        ("length", [5, 6], TEXT, "length", ["truncated"]),
        ("stop", [2], Output("", None, True, ()), "empty", []),
        ("stop", [], Output("", None, True, ()), "empty", []),
        ("stop", [5, 2], Output(" \n", None, True, ()), "empty", []),
        ("length", [5, 6], Output("", "so", False, ()), "reasoning_only", ["truncated"]),
        ("stop", [5, 6, 2], Output("", "so", False, ()), "reasoning_only", []),
        ("stop", [5, 6, 2], Output("", "so", True, ()), "reasoning_only", []),
        ("stop", [5, 6, 2], Output("Paris.", "so", True, ()), "ok", []),
        ("length", LOOP, TEXT, "repetition", []),
        ("length", LOOP, Output("", "so", False, ()), "repetition", []),
        ("stop", [*LOOP, 2], TEXT, "ok", ["repeating_tail"]),
        ("stop", [5, 9, 2], Output("", None, True, (9,)), "unexpected_tool_call", []),
        ("tool_calls", [5, 2], TEXT, "unexpected_tool_call", []),
        ("content_filter", [], Output("", None, True, ()), "content_filter", []),
    ],
)
def test_verdicts(finish, ids, output, outcome, flags):
    verdict = judge(Answer(finish, output_ids=ids), ids, output, False, EOS)
    assert (verdict.outcome, verdict.flags) == (outcome, flags)
    assert (verdict.reason is None) == (outcome == "ok")
    assert verdict.again == (outcome in ("empty", "content_filter"))


def test_tool_calls_are_welcome_where_tools_were_given():
    output = Output("", None, True, (9,))
    assert judge(Answer("tool_calls", output_ids=[9, 2]), [9, 2], output, True, EOS).outcome == "ok"
