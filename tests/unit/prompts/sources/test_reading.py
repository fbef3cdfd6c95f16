"""What is described is what was read, or the run stops."""

import gzip
import hashlib
import io
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources import read_rows
from scripts.lib.prompts.sources.files import local_file


def table(version, rows, name):
    texts = [f"{version} question {number}?" for number in range(rows)]
    if name.endswith(".parquet"):
        sink = io.BytesIO()
        pq.write_table(pa.table({"prompt": texts}), sink, row_group_size=500, compression=None)
        return sink.getvalue()
    data = ("prompt\n" + "\n".join(texts)).encode()
    return gzip.compress(data) if name.endswith(".gz") else data


NAMES = ["x.csv", "x.csv.gz", "x.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_described_as_it_was_read(tmp_path, name):
    data = table("old", 3000, name)
    (tmp_path / name).write_bytes(data)
    file = local_file(str(tmp_path / name))
    described = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert file.describe() == described
    assert len(list(read_rows([file]))) == 3000
    assert file.describe() == described


def renamed(path, data):
    (path.parent / "new").write_bytes(data)
    os.replace(path.parent / "new", path)


def renamed_with_its_time(path, data):
    status = path.stat()
    (path.parent / "new").write_bytes(data)
    os.utime(path.parent / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(path.parent / "new", path)


def rewritten_with_its_time(path, data):
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def removed(path, data):
    path.unlink()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [renamed, renamed_with_its_time, rewritten_with_its_time, removed])
@pytest.mark.parametrize("rows", [100_000, 90_000])
def test_a_file_that_changes_while_it_is_read_stops(tmp_path, name, change, rows):
    path = tmp_path / name
    path.write_bytes(table("old", 100_000, name))
    new = table("new", rows, name)
    reading = read_rows([local_file(str(path))])
    assert next(reading).value == {"prompt": "old question 0?"}
    change(path, new)
    with pytest.raises(UserError, match=rf"^{path}: "):
        list(reading)


@pytest.mark.parametrize("name", NAMES)
def test_a_change_after_the_last_row_stops_before_anything_is_described(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(table("old", 3000, name))
    file = local_file(str(path))
    assert list(read_rows([file]))
    rewritten_with_its_time(path, table("new", 3000, name))
    with pytest.raises(UserError, match=f"{path}: changed while it was read: run again when nothing writes to it"):
        file.describe()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_only_touched_goes_on(tmp_path, name):
    path = tmp_path / name
    data = table("old", 3000, name)
    path.write_bytes(data)
    file = local_file(str(path))
    reading = read_rows([file])
    next(reading)
    path.touch()
    renamed(path, data)
    assert len(list(reading)) == 2999
    assert file.describe()["sha256"] == hashlib.sha256(data).hexdigest()


def test_what_is_appended_in_time_is_read_and_described(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(table("old", 100_000, "x.csv"))
    file = local_file(str(path))
    reading = read_rows([file])
    next(reading)
    with open(path, "a") as more:
        more.write("\none more?\n")
    assert len(list(reading)) == 100_000
    data = path.read_bytes()
    assert file.describe() == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
