"""Bytes to raw rows: every kind of file, every compression, and what breaks inside them."""

import bz2
import functools
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources import rows
from scripts.lib.prompts.sources.rows import kind_of, parse_json, read_file

ONE, TWO = {"prompt": "one\u2028and\u2029a half"}, {"prompt": "zwei ü", "n": [1, None]}


def read(name, data):
    return list(read_file(name, lambda: io.BytesIO(data)))


def values(name, data):
    return [row.value for row in read(name, data)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "lines"), ("a.ndjson.gz", "lines"), ("x/a.b.JSON.zst", "json"), ("a.csv", "csv"), ("a.tsv", "tsv"),
        ("a.parquet", "parquet"), ("a.arrow", "arrow"), ("a.txt", "text"), ("a.whl", None), ("json", None), ("a.gz", None),
    ],
)  # fmt: skip
def test_kind_is_told_by_the_name(name, kind):
    assert kind_of(name) == kind


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


def test_what_orjson_refuses_is_read_when_python_can():
    assert parse_json('{"a": "\\ud800", "b": NaN}')["a"] == "\ud800"


def test_endless_line_is_one_bad_row(monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 64)
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
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    if chunk < 100 and not text.lstrip("\ufeff ").startswith("["):
        monkeypatch.setattr(rows, "CHUNK_BYTES", 100)  # the first line must be seen whole to tell lines from objects
    assert values("a.json", text.encode()) == [ONE, TWO]


def test_one_object_is_one_row():
    assert values("a.json", json.dumps(TWO, indent=2).encode()) == [TWO]


@given(
    st.lists(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.lists(st.text(max_size=3))
    )
)
def test_any_array_is_read_value_by_value(expected):
    assert values("a.json", json.dumps(expected).encode()) == expected


@pytest.mark.parametrize("ending", ["", ',{"prompt": "b"', ', {"prompt": }]', ", nonsense]"])
def test_broken_array_stops_with_its_place(ending):
    with pytest.raises(UserError, match=r"a\.json:2: .*broken from here on"):
        read("a.json", ('[{"prompt": "a"}' + ending).encode())


def test_row_of_an_array_may_not_be_endless(monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 50)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 16)
    with pytest.raises(UserError, match=r"a\.json:1"):
        read("a.json", json.dumps(["x" * 500]).encode())


PACKERS = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("ending", PACKERS)
def test_compressions(ending):
    lines = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    expected = [{"prompt": "a"}, {"prompt": "b"}]
    assert values(f"a.jsonl.{ending}", PACKERS[ending](lines)) == expected
    assert values("misnamed.jsonl", PACKERS[ending](lines)) == expected
    assert values(f"a.json.{ending}", PACKERS[ending](json.dumps(expected).encode())) == expected


def test_zstandard_in_several_frames():
    assert values("a.jsonl.zst", zstandard.compress(b'{"a": 1}\n') + zstandard.compress(b'{"a": 2}\n')) == [
        {"a": 1},
        {"a": 2},
    ]


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_damaged_archive_stops_with_the_files_name(ending):
    packed = PACKERS[ending](json.dumps({"prompt": "x" * 5000}).encode() * 50)
    with pytest.raises(UserError, match=rf"a\.jsonl\.{ending}: can't be read"):
        # The first half whole, then noise.
        read(f"a.jsonl.{ending}", packed[: len(packed) // 2] + b"\x00\xff" * 40)


def test_csv_counts_lines_not_records():
    data = '\ufeffquestion,answer\r\n"two\nlines, ""quoted""",x\r\n\r\nlast,y\r\n'.encode()
    assert [(row.where, row.value) for row in read("a.csv", data)] == [
        ("a.csv:2", {"question": 'two\nlines, "quoted"', "answer": "x"}),
        ("a.csv:5", {"question": "last", "answer": "y"}),
    ]


def test_csv_row_that_does_not_fit_is_one_bad_row():
    first, second, third = read("a.csv", b"a,b\n1\n1,2,3\n1,2\n")
    assert first.defect.reason == second.defect.reason == "broken_row"
    assert third.value == {"a": "1", "b": "2"}


def test_csv_with_bytes_that_are_not_utf8_is_left_to_cleaning():
    assert values("a.csv", b"prompt\ncaf\xe9\n") == [{"prompt": "caf\udce9"}]


@pytest.mark.parametrize("data", [b'prompt\n"never closed\n', b"a,a\n1,2\n"])
def test_broken_table_stops_with_its_place(data):
    with pytest.raises(UserError, match=r"a\.csv:\d"):
        read("a.csv", data)


def test_tsv_and_text():
    assert values("a.tsv", b"prompt\tn\nwith, comma\t1\n") == [{"prompt": "with, comma", "n": "1"}]
    assert [(r.where, r.value) for r in read("a.txt", b"first\r\n\n third \n")] == [
        ("a.txt:1", {"text": "first"}),
        ("a.txt:3", {"text": " third "}),
    ]


def parquet(table):
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


def arrow(table, opener):
    sink = io.BytesIO()
    with opener(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_parquet_and_both_arrow_formats(monkeypatch):
    monkeypatch.setattr(rows, "BATCH_ROWS", 2)
    expected = [{"messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(5)]
    table = pa.Table.from_pylist(expected)
    for name, data in [
        ("a.parquet", parquet(table)),
        ("a.arrow", arrow(table, pa.ipc.new_stream)),
        ("a.arrow", arrow(table, pa.ipc.new_file)),
    ]:
        assert [(row.where, row.value) for row in read(name, data)] == [
            (f"{name}:{n + 1}", value) for n, value in enumerate(expected)
        ]


def test_text_of_parquet_that_is_not_utf8_is_one_bad_row():
    column = pa.array([b"good", b"b\xffd", b"fine"]).view(pa.string())
    good, bad, fine = read("a.parquet", parquet(pa.table({"prompt": column})))
    assert (good.value, fine.value) == ({"prompt": "good"}, {"prompt": "fine"})
    assert (bad.where, bad.defect.reason) == ("a.parquet:2", "invalid_unicode")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_broken_columnar_file_stops_with_its_name(name):
    with pytest.raises(UserError, match=rf"{name}: not a readable"):
        read(name, b"PAR1 nothing that can be read PAR1")


def test_unknown_kind_and_missing_file():
    with pytest.raises(UserError, match="known endings: jsonl"):
        read("a.docx", b"")
    with pytest.raises(UserError, match="nowhere.jsonl: no such file"):
        list(read_file("nowhere.jsonl", functools.partial(Path("/nowhere/nowhere.jsonl").open, "rb")))
