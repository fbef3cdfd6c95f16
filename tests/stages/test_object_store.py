"""Sources, uploads and backups on a real S3 server on loopback."""

import io
import json
import os
import socket

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from scripts import backup_training, restore_training, upload_results
from scripts.lib.config.model import Upload
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.exports.upload import Uploader
from scripts.lib.prompts.sources import read_rows
from scripts.lib.prompts.sources.remote import remote_files
from scripts.lib.stores import File, TransferError, open_store, s3
from tests.corpora import bytes_of, corpus
from tests.object_store import BUCKET, KEYS, object_store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with object_store(tmp_path_factory.mktemp("seaweed")) as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["accessKey"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secretKey"])
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def prefix(request):
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').strip(']')}"


@pytest.fixture
def settings(server, prefix):
    return Upload(target=prefix, endpoint_url=server.url, region="us-east-1", stages=["completions", "training"])


@pytest.fixture
def store(prefix, settings):
    return open_store(prefix, settings)


def file_of(path, size, key="folder/file"):
    path.write_bytes(os.urandom(size))
    return File(path, key, size, durable.sha256_file(path))


@pytest.fixture
def small_parts(monkeypatch):
    """S3's own minimum, so that a small file has several parts."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)


@pytest.mark.parametrize("size", [0, 1000, (12 << 20) + 1])
def test_a_file_arrives_and_comes_back(store, tmp_path, small_parts, size):
    file = file_of(tmp_path / "file", size)
    assert not store.holds(file)
    store.put([file])
    assert store.holds(file)
    store.get(file.key, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.path.read_bytes()
    assert store.keys("") == ["folder/file"]
    other = File(file.path, file.key, size, "0" * 64)
    assert not store.holds(other)
    store.delete(file.key)
    store.delete(file.key)
    assert store.keys("") == []
    with pytest.raises(TransferError, match="folder/file: is not there"):
        store.get(file.key, tmp_path / "back")


def calls_of(store, monkeypatch, fail_at=None):
    """Count the calls of each operation; the `fail_at`-th upload_part fails."""
    calls = []
    real = store._call

    def call(operation, **arguments):
        calls.append(operation)
        if operation == "upload_part" and calls.count("upload_part") == fail_at:
            raise TransferError("the line is down")
        return real(operation, **arguments)

    monkeypatch.setattr(store, "_call", call)
    return calls


def test_an_interrupted_multipart_upload_goes_on(settings, prefix, tmp_path, small_parts, monkeypatch):
    file = file_of(tmp_path / "file", 23 << 20)
    saved = []
    file.save = lambda: saved.append(dict(file.memory))
    first = open_store(prefix, settings)
    calls_of(first, monkeypatch, fail_at=4)
    with pytest.raises(TransferError, match="the line is down"):
        first.put([file])
    # What a process that was killed there has left in its ledger.
    resumed = File(file.path, file.key, file.size, file.sha256, saved[-1])
    second = open_store(prefix, settings)
    calls = calls_of(second, monkeypatch)
    second.put([resumed])
    assert calls.count("upload_part") == 2
    assert second.holds(resumed)
    assert resumed.memory == {}


def test_another_content_begins_anew_and_leaves_nothing_behind(
    settings, prefix, server, tmp_path, small_parts, monkeypatch
):
    file = file_of(tmp_path / "file", 12 << 20)
    first = open_store(prefix, settings)
    calls_of(first, monkeypatch, fail_at=2)
    with pytest.raises(TransferError):
        first.put([file])
    changed = file_of(tmp_path / "file", 12 << 20)
    changed.memory = file.memory
    second = open_store(prefix, settings)
    second.put([changed])
    assert second.holds(changed)
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{second.prefix}/")


def test_an_upload_that_the_server_forgot_begins_anew(store, tmp_path, small_parts):
    file = file_of(tmp_path / "file", 12 << 20)
    file.memory = {"upload_id": "0" * 40, "sha256": file.sha256}
    with pytest.raises(TransferError, match="the server forgot the upload"):
        store.put([file])
    store.put([file])
    assert store.holds(file)


@pytest.mark.parametrize("size", [1000, 12 << 20])
def test_damage_on_the_way_is_seen(store, tmp_path, small_parts, monkeypatch, size):
    file = file_of(tmp_path / "file", size)
    real = store._call

    def damaged(operation, **arguments):
        if operation in ("put_object", "upload_part"):
            body = arguments["Body"]
            data = bytearray(body if isinstance(body, bytes) else body.read())
            data[len(data) // 2] ^= 1
            arguments["Body"] = bytes(data)
        return real(operation, **arguments)

    monkeypatch.setattr(store, "_call", damaged)
    with pytest.raises(TransferError):
        store.put([file])
    monkeypatch.undo()
    assert not store.holds(file)


@pytest.mark.parametrize("damage", [False, True])
def test_a_server_that_tells_no_checksum_is_read_back(store, server, tmp_path, monkeypatch, damage):
    file = file_of(tmp_path / "file", 1000)
    real = store._call

    def silent(operation, **arguments):
        answer = real(operation, **arguments)
        if operation == "put_object" and damage:
            server.client.put_object(Bucket=BUCKET, Key=arguments["Key"], Body=b"something else")
        answer.pop("ChecksumSHA256", None)
        return answer

    monkeypatch.setattr(store, "_call", silent)
    if damage:
        with pytest.raises(TransferError, match="the bytes read back are not those that were sent"):
            store.put([file])
    else:
        store.put([file])
        assert store.holds(file)


def test_wrong_secrets_and_buckets_are_the_users_to_mend(settings, tmp_path, monkeypatch):
    file = file_of(tmp_path / "file", 10)
    with pytest.raises(UserError, match="AccessDenied: .*these credentials may not do that here"):
        open_store("s3://another-bucket/x", settings).put([file])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for work in (
        lambda: open_store(f"s3://{BUCKET}/x", settings).put([file]),
        lambda: open_store(f"s3://{BUCKET}/x", settings).holds(file),
    ):
        with pytest.raises(UserError, match=r"SignatureDoesNotMatch: .*check AWS_SECRET_ACCESS_KEY"):
            work()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(UserError, match=r"InvalidAccessKeyId: .*check AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{BUCKET}/x", settings).holds(file)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="check AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{BUCKET}/x", settings).put([file])


def test_a_run_uploads_over_an_outage(server, settings, store, tmp_path):
    results = tmp_path / "results"
    manifest = corpus(results)
    said: list[str] = []
    with socket.socket() as closed:  # bound, not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        nowhere = settings.model_copy(update={"endpoint_url": f"http://127.0.0.1:{closed.getsockname()[1]}"})
        away = Uploader(results, nowhere, lambda: open_store(nowhere.target, nowhere), said.append)
        assert away.once().s3_failed == len(manifest.parts)
    assert all("tried again later" in line for line in said)
    back = Uploader(results, settings, lambda: store, said.append)
    counts = back.once(hurry=True)
    assert (counts.s3_failed, counts.s3_uploaded) == (0, len(manifest.parts) + 2)
    store.get("training/manifest.json", tmp_path / "manifest.json")
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == manifest.version


def test_command_lines(server, prefix, tmp_path, capsys):
    results = tmp_path / "results"
    corpus(results)
    before = bytes_of(results / "training")
    settings = {
        "datasets": {"alpha": {"class": "B", "source": "x"}},
        "upload": {"target": prefix, "endpoint_url": server.url, "region": "us-east-1"},
        "backup": {"second_location": f"{prefix}/backups"},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert upload_results.main(["--config", str(config), "--results", str(results)]) == 0
    where = ["--training", str(results / "training"), "--backups", str(results / "backups")]
    assert backup_training.main(["--config", str(config), *where]) == 0
    capsys.readouterr()
    # A new machine.
    fetch = ["--fetch-from", f"{prefix}/backups", "--endpoint-url", server.url]
    new = ["--training", str(tmp_path / "new/training"), "--backups", str(tmp_path / "new/backups")]
    assert restore_training.main([*new, *fetch, "--list"]) == 0
    name = capsys.readouterr().out.strip()
    assert restore_training.main([*new, *fetch, "--name", name]) == 0
    assert bytes_of(tmp_path / "new/training") == before


@pytest.mark.parametrize("source", ["", "/", "/*.jsonl", "/a.jsonl"])
def test_prompts_are_read_from_a_bucket(server, prefix, source, monkeypatch):
    """A glob, a folder, one file; ranges of it, as Parquet needs them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    folder = f"{prefix.removeprefix(f's3://{BUCKET}/')}"
    rows = [{"prompt": f"Question number {n}: why?"} for n in range(3000)]
    for name in ("a", "b"):
        body = b"".join(orjson.dumps(row) + b"\n" for row in rows)
        server.client.put_object(Bucket=BUCKET, Key=f"{folder}/{name}.jsonl", Body=body)
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=500)
    server.client.put_object(Bucket=BUCKET, Key=f"{folder}/c.parquet", Body=table.getvalue())
    files = remote_files(prefix + source, "datasets.d.source")
    names = {"": "ab c", "/": "ab c", "/*.jsonl": "ab", "/a.jsonl": "a"}[source].replace(" ", "")
    assert [file.name.rpartition("/")[2][0] for file in files] == list(names)
    assert [row.value["prompt"] for row in read_rows(files)] == [row["prompt"] for row in rows] * len(names)
    assert all(file.describe()["size"] for file in files)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_object_that_is_replaced_while_it_is_read_stops(server, prefix, name, monkeypatch):
    """Its rows were of both versions, and provenance named the new one only."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.BLOCK_BYTES", 65_536)
    monkeypatch.setattr("scripts.lib.prompts.sources.remote.RANDOM_BLOCK_BYTES", 65_536)
    key = f"{prefix.removeprefix(f's3://{BUCKET}/')}/{name}"

    def put(version, rows):
        table = pa.table({"prompt": [f"{version} question {number}?" for number in range(rows)]})
        sink = io.BytesIO()
        if name.endswith(".parquet"):
            pq.write_table(table, sink, row_group_size=1000, compression=None)
        else:
            sink.write(b"".join(orjson.dumps(row) + b"\n" for row in table.to_pylist()))
        return server.client.put_object(Bucket=BUCKET, Key=key, Body=sink.getvalue())["ETag"]

    put("old", 90_000)
    (file,) = remote_files(f"{prefix}/{name}", "datasets.d.source")
    reading = read_rows([file])
    assert next(reading).value == {"prompt": "old question 0?"}
    etag = put("new", 90_000)
    with pytest.raises(UserError, match=f"^s3://.*/{name}: changed while it was read: run again"):
        list(reading)
    (file,) = remote_files(f"{prefix}/{name}", "datasets.d.source")
    assert {row.value["prompt"].split()[0] for row in read_rows([file])} == {"new"}
    assert file.describe()["etag"] == etag


def test_a_source_that_the_bucket_does_not_give(server, prefix, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with pytest.raises(UserError, match=r"datasets.d.source: s3://.*no file matches"):
        remote_files(f"{prefix}/*.jsonl", "datasets.d.source")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UserError, match=r"datasets.d.source: s3://.*can't be reached"):
        remote_files(f"{prefix}/*.jsonl", "datasets.d.source")
