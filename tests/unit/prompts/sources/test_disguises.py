"""Files that are not what their names say: stopped by name, with what to do."""

import bz2
import io
import json
import pickle
import sqlite3
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from scripts.lib.core.errors import UserError
from tests.raw_rows import read, values

ROWS = "".join(json.dumps({"prompt": f"Question {n}?"}) + "\n" for n in range(40))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 3491222\n" % (b"4f" * 32)


def zipped():
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.jsonl", ROWS)
    return sink.getvalue()


def tar():
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(ROWS)
        archive.addfile(member, io.BytesIO(ROWS.encode()))
    return sink.getvalue()


def database(folder):
    connection = sqlite3.connect(folder / "a.db")
    connection.execute("CREATE TABLE prompt (text)")
    connection.commit()
    connection.close()
    return (folder / "a.db").read_bytes()


def arrow():
    sink = io.BytesIO()
    table = pa.table({"prompt": ["Why?"]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def parquet():
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["Why?"]}), sink)
    return sink.getvalue()


TEXTS = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"]
ANY = [*TEXTS, "a.parquet", "a.arrow"]


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (LFS, "is a Git LFS pointer, not the file: run `git lfs pull`"),
        (LFS.replace(b"git-lfs.github", b"hawser.github"), "is a Git LFS pointer"),
        (b"/annex/objects/SHA256E-s3491222--4f4f4f.jsonl\n", "is a git-annex pointer, not the file: run `git annex get`"),
        (b"../../.git/annex/objects/kX/9j/MD5E-s12--4f/MD5E-s12--4f.jsonl", "is a git-annex pointer"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", "is a web page"),
        (zipped(), "is a zip archive"),
        (b"\x04\x22\x4d\x18" + bytes(range(200)), "is compressed with lz4"),
        (b"\xff\x06\x00\x00sNaPpY" + bytes(range(200)), "is compressed with snappy"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(200), "is a 7z archive"),
        (b"Rar!\x1a\x07\x01\x00" + bytes(200), "is a rar archive"),
        (b"%PDF-1.7\n%\xe2\xe3\x00\x01\x02" + bytes(range(200)), "is a PDF"),
        (pickle.dumps([{"prompt": "a"}] * 9), "is a Python pickle"),
    ],
    ids=["lfs", "hawser", "annex", "annex path", "html", "zip", "lz4", "snappy", "7z", "rar", "pdf", "pickle"],
)  # fmt: skip
def test_a_file_that_is_something_else_stops(name, data, message):
    with pytest.raises(UserError, match=rf"^{name}: {message}") as raised:
        read(name, data)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar(), "is a tar archive"),
        (ROWS.encode("utf-16"), "is UTF-16 text: convert it with `iconv -f UTF-16 -t UTF-8`"),
        (ROWS.encode("utf-16-le"), "is UTF-16 text"),
        (ROWS.encode("utf-16-be"), "is UTF-16 text"),
        (ROWS.encode("utf-32"), "is UTF-32 text"),
        (parquet(), "is a Parquet file: name it .parquet"),
        (arrow(), "is an Arrow file: name it .arrow"),
        (bytes(range(256)) * 4, "is binary"),
    ],
    ids=["tar", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "parquet", "arrow", "noise"],
)
def test_a_text_that_is_none_stops(name, data, message):
    with pytest.raises(UserError, match=rf"^{name}: {message}"):
        read(name, data)
    with pytest.raises(UserError, match=rf"^{name}\.bz2: {message}"):
        read(f"{name}.bz2", bz2.compress(data))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is XML, as stores answer"),
        ("a.csv", b"<html><head><title>504</title></head></html>", "is a web page"),
        ("a.txt", ROWS.encode(), "holds JSON Lines: name it .jsonl"),
        ("a.parquet", ROWS.encode(), "is JSON: name it .jsonl or .json"),
        ("a.parquet", zstandard.compress(parquet()), "is compressed as a whole: unpack it"),
        ("a.parquet", arrow(), "is an Arrow file: name it .arrow"),
        ("a.arrow", parquet(), "is a Parquet file: name it .parquet"),
        ("a.jsonl.zst", LFS, "is a Git LFS pointer"),
        ("a.jsonl.gz", zipped(), "is a zip archive"),
    ],
)
def test_the_message_names_what_it_is(name, data, message):
    with pytest.raises(UserError, match=rf"^{name}: {message}"):
        read(name, data)


def test_a_database_named_as_text(tmp_path):
    with pytest.raises(UserError, match="is an SQLite database"):
        read("a.csv", database(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        "PAR1 is what a Parquet file begins with. Why?", "ORC or Parquet?", "Rar! What does it mean?", "%PDF is what?",
        "<div> or <span>?", "<html> is what?", '{"a": 1} is which format?', "version 2 of what?", "\x1b[1mbold\x1b[0m?",
        "ÿþ are two letters", "nul \x00 inside a text that goes on and on", "/annex is which road?", "7z or zip?",
    ],
)  # fmt: skip
def test_prompts_that_only_look_like_it_are_prompts(line):
    assert values("a.txt", f"{line}\nAnd another one?\n".encode()) == [{"text": line}, {"text": "And another one?"}]
    assert values("a.csv", f'"{line}"\nAnd another one?\n'.replace('{"a"', "{a").encode())[0] is not None
