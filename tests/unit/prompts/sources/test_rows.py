"""Which reader a file's name chooses, and files that can't be read as a whole."""

import functools
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.rows import kind_of, read_file
from tests.raw_rows import read


def parquet(texts):
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": pa.array(texts).view(pa.string())}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "lines"), ("a.ndjson.gz", "lines"), ("x/a.b.JSON.zst", "json"), ("a.csv", "csv"), ("a.tsv", "tsv"),
        ("a.parquet", "parquet"), ("a.arrow", "arrow"), ("a.txt", "text"), ("a.whl", None), ("json", None), ("a.gz", None),
    ],
)  # fmt: skip
def test_kind_is_told_by_the_name(name, kind):
    assert kind_of(name) == kind


def test_unknown_kind_and_missing_file():
    with pytest.raises(UserError, match="known endings: jsonl"):
        read("a.docx", b"")
    with pytest.raises(UserError, match="nowhere.jsonl: no such file"):
        list(read_file("nowhere.jsonl", functools.partial(Path("/nowhere/nowhere.jsonl").open, "rb")))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b""), ("a.json", b"[]"), ("a.csv", b"prompt,answer\n"), ("a.txt", b"\n\n"), ("a.jsonl.gz", b""),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)), ("a.csv", b"404: Not Found"),
    ],
)  # fmt: skip
def test_a_file_without_rows_stops(name, data):
    with pytest.raises(UserError, match=rf"^{name}: holds no rows"):
        read(name, data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b"Entry not found"), ("a.jsonl", b'{"prompt": "cut o'), ("a.jsonl", b"../elsewhere/a.jsonl"),
        ("a.jsonl", b"1\n2\n3\n"), ("a.json", b"null"), ("a.csv", b"prompt,answer\nWhy?\n"),
        ("a.parquet", parquet([b"\xff", b"\xfe"])),
    ],
)  # fmt: skip
def test_a_file_none_of_whose_rows_can_be_read_stops(name, data):
    with pytest.raises(UserError, match=rf"^{name}: none of its rows can be read \({name}:\d: .*fetch it again"):
        read(name, data)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.zst", "a.ndjson.xz", "a.json.bz2"])
def test_a_compressed_name_needs_compressed_content(name):
    with pytest.raises(UserError, match=f"^{name}: is not compressed, though its name says so"):
        read(name, b'{"prompt": "plain"}\n')
