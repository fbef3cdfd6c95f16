"""Sources behind URLs: real HTTP, and broken connections that reading survives."""

import io

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.config.model import Dataset
from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources import read_rows, source_files
from scripts.lib.prompts.sources.remote import ATTEMPTS, Steady
from tests.hub_server import hub_server


@pytest.fixture
def hub():
    """The Hub's server also serves plain files with ranges."""
    with hub_server() as hub:
        yield hub


def files(source):
    return source_files("a", Dataset(**{"class": "B"}, source=source))


def prompts(source):
    return [row.value["prompt"] for row in read_rows(files(source))]


def test_files_of_a_web_server(hub, monkeypatch):
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BLOCK_BYTES", 4096)
    expected = [f"Question {n}?" for n in range(2000)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": expected}), sink, row_group_size=300)
    hub.datasets["a/b"] = {"x.csv": ("prompt\n" + "\n".join(expected)).encode(), "x.parquet": sink.getvalue()}
    for name in ("x.csv", "x.parquet"):
        assert prompts(f"{hub.url}/datasets/a/b/resolve/main/{name}") == expected
        assert any(hub.asked("GET", name))  # by ranges: nothing is held whole
    (file,) = files(f"{hub.url}/datasets/a/b/resolve/main/x.csv?token=secret")
    assert file.name == f"{hub.url}/datasets/a/b/resolve/main/x.csv"
    assert file.describe()["size"] == str(len(hub.datasets["a/b"]["x.csv"]))


def test_broken_connection_is_read_on(hub, monkeypatch):
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BACKOFF_SECONDS", 0)
    expected = [f"Question {n}?" for n in range(500)]
    hub.datasets["a/b"] = {"x.csv": ("prompt\n" + "\n".join(expected)).encode()}
    hub.cut["x.csv"] = 1000
    assert prompts(f"{hub.url}/datasets/a/b/resolve/main/x.csv") == expected
    assert "x.csv" not in hub.cut


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{url}/datasets/a/b/resolve/main/no.csv?key=secret", r"/main/no\.csv: no such file"),
        ("http://127.0.0.1:9/x.csv", r"http://127\.0\.0\.1:9/x\.csv: can't be read: gave up after 6 attempts"),
        ("nothing://bucket/x.csv", "nothing://bucket/x.csv: .*nothing"),
        ("{url}/datasets/a/shut/resolve/main/x.csv?key=secret", r"/main/x\.csv: can't be read: HTTP 401"),
        ("memory://empty/*.csv", r"memory://empty/\*\.csv: no file matches"),
        ("{url}/datasets/a/b/resolve/main/x.docx", "unknown kind of file"),
    ],
)
def test_mistakes_are_one_line_without_secrets(hub, monkeypatch, source, message):
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BACKOFF_SECONDS", 0)
    hub.datasets |= {"a/b": {"x.docx": b"x"}, "a/shut": {"x.csv": b"x"}}
    hub.gated["a/shut"] = "another"
    with pytest.raises(UserError, match=message) as raised:
        prompts(source.format(url=hub.url))
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_globs_and_folders_of_a_store_that_can_list():
    store = fsspec.filesystem("memory")
    for name, prompt in (("b.csv", "two"), ("a.csv", "one"), ("readme.md", "no")):
        store.pipe(f"/bucket/folder/{name}", f"prompt\n{prompt}\n".encode())
    try:
        assert prompts("memory://bucket/folder/*.csv") == ["one", "two"]
        assert prompts("memory://bucket/folder") == ["one", "two"]
    finally:
        store.rm("/bucket", recursive=True)


class Flaky(io.BytesIO):
    """Fails at every third read, as a bad line does."""

    reads = 0

    def read(self, size=-1):
        Flaky.reads += 1
        if Flaky.reads % 3 == 0:
            raise ConnectionResetError("connection reset")
        return super().read(size)


def test_steady_reads_every_byte_once():
    data = bytes(range(256)) * 40
    opened, slept = [], []

    def open_file():
        opened.append(Flaky(data))
        return opened[-1]

    file = io.BufferedReader(Steady(open_file, sleep=slept.append), 100)
    assert b"".join(iter(lambda: file.read(90), b"")) == data
    file.seek(-10, io.SEEK_END)
    assert file.read() == data[-10:]
    assert len(opened) > 10
    assert set(slept) == {1}


def test_steady_gives_up_on_a_dead_store():
    slept = []

    def open_file():
        raise ConnectionResetError("connection reset")

    with pytest.raises(OSError, match=f"gave up after {ATTEMPTS} attempts: connection reset"):
        Steady(open_file, sleep=slept.append).read(10)
    assert slept == [1, 2, 4, 8, 16]
