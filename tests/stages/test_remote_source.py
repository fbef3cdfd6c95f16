"""Sources behind URLs: real HTTP, and broken connections that reading survives."""

import hashlib
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.config.model import Dataset
from scripts.lib.core.errors import UserError
from scripts.lib.core.waiting import ATTEMPTS, Transient
from scripts.lib.prompts.sources import read_rows, source_files
from scripts.lib.prompts.sources.remote import Steady
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
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BLOCK_BYTES", 65_536)
    expected = [f"Question {n}?" for n in range(2000)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": expected}), sink, row_group_size=300)
    hub.datasets["a/b"] = {"x.csv": ("prompt\n" + "\n".join(expected)).encode(), "x.parquet": sink.getvalue()}
    for name in ("x.csv", "x.parquet"):
        assert prompts(f"{hub.url}/datasets/a/b/resolve/main/{name}") == expected
        assert any(hub.asked("GET", name))  # by ranges: nothing is held whole
    (file,) = files(f"{hub.url}/datasets/a/b/resolve/main/x.csv?token=secret")
    assert file.name == f"{hub.url}/datasets/a/b/resolve/main/x.csv"
    data = hub.datasets["a/b"]["x.csv"]
    seen = {"size": len(data), "etag": f'"{hashlib.sha256(data).hexdigest()}"'}
    assert file.describe() == seen
    assert list(read_rows([file]))
    assert file.describe() == seen | {"sha256": hashlib.sha256(data).hexdigest()}


def test_broken_connection_is_read_on(hub, monkeypatch):
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
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
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
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


class Flaky:
    """Bytes whose every third read fails, as those of a bad line do."""

    has_ranges = True

    def __init__(self, data, fails=lambda read: read % 3 == 0):
        self.data, self.fails, self.reads, self.version = data, fails, 0, {}

    def read(self, position, size):
        self.reads += 1
        if self.fails(self.reads):
            raise Transient(OSError("connection reset"))
        self.version = {"size": len(self.data)}
        return self.data[position : position + size]

    def close(self):
        pass


def test_steady_reads_every_byte_once(monkeypatch):
    slept = []
    monkeypatch.setattr("scripts.lib.core.waiting.time.sleep", slept.append)
    data = bytes(range(256)) * 40
    pinned = Flaky(data)
    file = io.BufferedReader(Steady(pinned, "f"), 100)
    assert b"".join(iter(lambda: file.read(90), b"")) == data
    file.seek(-10, io.SEEK_END)
    assert file.read() == data[-10:]
    assert pinned.reads > 10
    assert set(slept) == {1}


def test_steady_gives_up_on_a_dead_store(monkeypatch):
    slept = []
    monkeypatch.setattr("scripts.lib.core.waiting.time.sleep", slept.append)
    with pytest.raises(OSError, match=f"gave up after {ATTEMPTS} attempts: connection reset"):
        Steady(Flaky(b"", fails=lambda read: True), "f").read(10)
    assert slept == [1, 2, 4, 8, 16]


def versions(old, new):
    """Two versions of a table, as CSV and as Parquet: {name: (old, new)}."""
    found = {}
    for name in ("x.csv", "x.parquet"):
        found[name] = []
        for version, rows in (("old", old), ("new", new)):
            texts = [f"{version} question {number}?" for number in range(rows)]
            sink = io.BytesIO()
            pq.write_table(pa.table({"prompt": texts}), sink, row_group_size=500, compression=None)
            found[name].append(("prompt\n" + "\n".join(texts)).encode() if name == "x.csv" else sink.getvalue())
    return found


def versions_read(source):
    try:
        return {row.split()[0] for row in prompts(source)}
    except UserError as error:
        assert "changed while it was read" in str(error)
        return {"changed"}


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
@pytest.mark.parametrize("rows", [90_000, 80_000, 100_000])
@pytest.mark.parametrize("etag", [True, False])
def test_a_file_that_is_replaced_while_it_is_read_stops(hub, monkeypatch, name, rows, etag):
    """Its rows were of both versions, and only the new one was named."""
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BLOCK_BYTES", 65_536)
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.RANDOM_BLOCK_BYTES", 65_536)
    monkeypatch.setattr("scripts.lib.prompts.sources.arrow_rows.CHUNK_BYTES", 65_536)
    old, new = versions(90_000, rows)[name]
    hub.datasets["a/b"] = {name: old}
    if not etag:
        hub.without_etag.add(name)
    hub.while_sent[name] = lambda: hub.datasets["a/b"].update({name: new})
    source = f"{hub.url}/datasets/a/b/resolve/main/{name}"
    if etag:
        with pytest.raises(
            UserError, match=rf"/{name}: changed while it was read: run again when nothing writes to it"
        ):
            prompts(source)
    else:  # which version the next request meets is a matter of luck; rows of both there are never
        assert versions_read(source) in ({"old"}, {"new"}, {"changed"})
    assert {row.split()[0] for row in prompts(source)} == {"new"}


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
@pytest.mark.parametrize("etag", [True, False])
def test_a_server_without_ranges_is_read_in_one_go(hub, monkeypatch, name, etag):
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BLOCK_BYTES", 65_536)
    data, new = versions(4000, 4000)[name]
    hub.datasets["a/b"] = {name: data}
    hub.without_ranges.add(name)
    if not etag:
        hub.without_etag.add(name)
    source = f"{hub.url}/datasets/a/b/resolve/main/{name}"
    expected = [f"old question {number}?" for number in range(4000)]
    assert prompts(source) == expected
    (file,) = files(source)
    assert list(read_rows([file]))
    assert file.describe()["size"] == len(data)
    # A connection that breaks: what was read is read again, and compared.
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
    hub.cut[name] = len(data) // 2
    assert prompts(source) == expected
    hub.cut[name] = len(data) // 2
    hub.while_sent[name] = lambda: hub.datasets["a/b"].update({name: new})
    # How much had arrived before the break is a matter of luck; rows of both versions there are never.
    assert versions_read(source) in ({"new"}, {"changed"})


def test_a_busy_server_is_asked_again_when_it_says(hub, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr("scripts.lib.core.waiting.time.sleep", slept.append)
    hub.datasets["a/b"] = {"x.csv": b"prompt\nWhy?\n"}
    hub.busy_files = [(503, {}), (429, {"Retry-After": "7"})]
    assert prompts(f"{hub.url}/datasets/a/b/resolve/main/x.csv") == ["Why?"]
    assert slept == [1, 7]
    assert "/x.csv: HTTP 429: trying again in 0:07\n" in capsys.readouterr().err


def test_an_empty_file_elsewhere(hub):
    hub.datasets["a/b"] = {"x.csv": b""}
    with pytest.raises(UserError, match=r"x\.csv: holds no rows"):
        prompts(f"{hub.url}/datasets/a/b/resolve/main/x.csv")


def test_a_file_of_any_store_that_is_replaced_while_it_is_read_stops():
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/a.csv", b"prompt\n" + b"old?\n" * 500)
    (file,) = files("memory://bucket/a.csv")
    try:
        rows = read_rows([file])
        assert next(rows).value == {"prompt": "old?"}
        store.pipe("/bucket/a.csv", b"prompt\n" + b"new?\n" * 400)
        with pytest.raises(UserError, match=r"memory://bucket/a\.csv: changed while it was read"):
            list(rows)
    finally:
        store.rm("/bucket", recursive=True)


class Elsewhere(BaseHTTPRequestHandler):
    """A server that sends to a signed address on another host (localhost), or round in a circle."""

    asked: ClassVar[list] = []

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("Authorization")))
        path, _, query = self.path.partition("?")
        if path == "/signed.csv":
            data = b"prompt\nWhy?\n"
            self.send_response(200)
        else:
            data = b""
            port = self.server.server_port
            target = (
                f"http://localhost:{port}/signed.csv?Signature=a%2Fb%2B%3D"
                if path == "/go.csv"
                else f"/loop.csv?{query}"
            )
            self.send_response(302)
            self.send_header("Location", target)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def elsewhere():
    Elsewhere.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"alice:PASSWORD@127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_signed_address_is_followed_as_it_stands_and_without_the_password(elsewhere):
    assert prompts(f"http://{elsewhere}/go.csv?key=KEY") == ["Why?"]
    first, second = Elsewhere.asked[:2]
    assert first[0] == "/go.csv?key=KEY"
    assert first[1].startswith("Basic ")
    assert second == ("/signed.csv?Signature=a%2Fb%2B%3D", None)


def test_a_circle_of_addresses_is_one_line_without_secrets(elsewhere, monkeypatch):
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
    with pytest.raises(UserError, match=r"loop\.csv: can't be read: ") as raised:
        prompts(f"http://{elsewhere}/loop.csv?key=KEY")
    assert not any(secret in str(raised.value) for secret in ("KEY", "PASSWORD", "alice"))
