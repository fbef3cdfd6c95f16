"""Numbers of JSON texts stay what they were, whatever their size."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core.exact_json import NotJson, json_text, parse_json

LONG = 123456789012345678901234567890

numbers = st.integers() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_any_value_comes_back_from_its_text(value):
    for text in (json_text(value), json.dumps(value)):
        assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize("number", [LONG, -LONG, 2**64, -(2**63) - 1, 2**63, 10**19])
def test_integers_beyond_64_bits_stay_integers(number):
    assert parse_json(f'{{"order": {number}}}') == {"order": number}
    assert json_text({"order": number}) == f'{{"order":{number}}}'


def test_what_orjson_refuses_is_read_when_python_can():
    assert parse_json('{"a": "\\ud800", "b": NaN}')["a"] == "\ud800"


@pytest.mark.parametrize("data", [b"{", "[1", "{'a': 1}", b'{"a": "\xff"}', "[" * 3000 + "]" * 3000, "", "1" * 5000])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(NotJson):
        parse_json(data)


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": "\ud800"}, b"x", {"n": LONG, "x": {1, 2}}])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(NotJson):
        json_text(value)


def test_null_is_no_reason_to_refuse():
    assert json_text({"default": None, "text": "null"}) == '{"default":null,"text":"null"}'
