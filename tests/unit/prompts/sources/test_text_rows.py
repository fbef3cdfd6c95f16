"""Rows of text: lines, arrays, objects, and what breaks inside them."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources import text_rows
from tests.raw_rows import read, values

ONE, TWO = {"prompt": "one\u2028and\u2029a half"}, {"prompt": "zwei ü", "n": [1, None]}


def test_json_lines_end_at_line_feed_only():
    data = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in (ONE, TWO)).encode()
    assert [(row.where, row.value) for row in read("a.jsonl", data)] == [("a.jsonl:1", ONE), ("a.jsonl:2", TWO)]


def test_byte_order_mark_crlf_and_blank_lines_are_no_rows():
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}'
    assert [(row.where, row.value["prompt"]) for row in read("a.jsonl", data)] == [
        ("a.jsonl:1", "a"),
        ("a.jsonl:4", "b"),
    ]


@pytest.mark.parametrize(
    "line", [b"{", b'{"a": 1', b"{'a': 1}", b'{"a": "\xff"}', b"[" * 3000 + b"]" * 3000, b'{"a": "x\ty\n"']
)
def test_broken_line_is_one_bad_row(line):
    first, second = read("a.jsonl", line.replace(b"\n", b"") + b'\n{"prompt": "b"}\n')
    assert first.defect.reason == "broken_json"
    assert first.where == "a.jsonl:1"
    assert second.value == {"prompt": "b"}


def test_endless_line_is_one_bad_row(monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 64)
    data = b'{"prompt": "' + b"x" * 300 + b'"}\n{"prompt": "b"}\n'
    first, second = read("a.jsonl", data)
    assert first.defect.reason == "row_too_large"
    assert (second.where, second.value) == ("a.jsonl:2", {"prompt": "b"})


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([ONE, TWO]),
        json.dumps([ONE, TWO], indent=2, ensure_ascii=False),
        json.dumps(ONE) + "\n" + json.dumps(TWO) + "\n",
        json.dumps(ONE, indent=1) + "\n" + json.dumps(TWO, indent=1),
        "\ufeff [" + json.dumps(ONE) + " ,\n" + json.dumps(TWO) + "]\n",
    ],
    ids=["array", "indented array", "lines", "objects in a row", "BOM"],
)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_json_in_all_its_layouts(monkeypatch, text, chunk):
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", chunk)
    if chunk < 100 and not text.lstrip("\ufeff ").startswith("["):
        monkeypatch.setattr(
            text_rows, "CHUNK_BYTES", 100
        )  # the first line must be seen whole to tell lines from objects
    assert values("a.json", text.encode()) == [ONE, TWO]


def test_one_object_is_one_row():
    assert values("a.json", json.dumps(TWO, indent=2).encode()) == [TWO]


@given(
    st.lists(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.lists(st.text(max_size=3))
    )
)
def test_any_array_is_read_value_by_value(expected):
    stream = io.BufferedReader(io.BytesIO(json.dumps(expected).encode()))
    assert [row.value for row in text_rows.json_values("a.json", stream)] == expected


@pytest.mark.parametrize("ending", ["", ',{"prompt": "b"', ', {"prompt": }]', ", nonsense]"])
def test_broken_array_stops_with_its_place(ending):
    with pytest.raises(UserError, match=r"a\.json:2: .*broken from here on"):
        read("a.json", ('[{"prompt": "a"}' + ending).encode())


def test_row_of_an_array_may_not_be_endless(monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 50)
    monkeypatch.setattr(text_rows, "CHUNK_BYTES", 16)
    with pytest.raises(UserError, match=r"a\.json:1"):
        read("a.json", json.dumps(["x" * 500]).encode())


def test_text_is_a_prompt_per_line():
    assert [(r.where, r.value) for r in read("a.txt", b"first\r\n\n third \n")] == [
        ("a.txt:1", {"text": "first"}),
        ("a.txt:3", {"text": " third "}),
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_named_as_lines_is_read_as_one(indent):
    text = json.dumps([ONE, TWO], indent=indent)
    assert values("a.jsonl", text.encode()) == values("a.jsonl", text.encode() + b"\n") == [ONE, TWO]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_lines_may_be_lists_of_turns(name):
    first = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    lines = json.dumps(first) + "\n" + json.dumps(first[:1]) + "\n"
    assert values(name, lines.encode()) == [first, first[:1]]


def test_one_line_of_turns_is_one_row():
    turns = [{"from": "human", "value": "Why?"}]
    assert values("a.jsonl", json.dumps(turns).encode()) == [turns]


def test_arrays_one_after_the_other_are_all_read():
    """What `cat a.json b.json` makes: the second array was lost."""
    text = json.dumps([ONE], indent=1) + "\n" + json.dumps([TWO, ONE])
    assert values("a.json", text.encode()) == [ONE, TWO, ONE]


def test_what_follows_an_array_is_no_secret():
    with pytest.raises(UserError, match=r"a\.json:2: something follows after the array"):
        read("a.json", (json.dumps([ONE]) + ' {"prompt": "lost"}').encode())


def test_integers_are_exact_in_lines_and_arrays():
    row = {"prompt": "a", "order": 123456789012345678901234567890}
    for name, value in (("a.jsonl", row), ("a.json", [row]), ("b.json", row)):
        assert values(name, json.dumps(value).encode()) == [row]
