"""What S3 refuses, by its own names."""

import pytest

from scripts.lib.config.model import Upload
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.stores import File, TransferError, open_store
from tests.faulty_s3 import faulty_s3


@pytest.fixture
def server():
    with faulty_s3() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No credentials but these, from wherever this machine has any."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def store_of(server):
    return open_store("s3://corpora/my prefix", Upload(endpoint_url=server.url, region="us-east-1"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"bytes of a part")
    return File(path, "a/part", 15, durable.sha256_file(path))


def test_a_file_arrives(server, file):
    store = store_of(server)
    assert not store.holds(file)
    store.put([file])
    assert store.holds(file)
    assert server.objects["/corpora/my prefix/a/part"][0] == b"bytes of a part"


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("RequestTimeTooSkewed", "this machine's clock differs from the server's: set it"),
        ("ExpiredToken", "the credentials have expired: renew them, they are read again"),
        ("InvalidToken", "check AWS_SESSION_TOKEN"),
        ("InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", "check AWS_SECRET_ACCESS_KEY"),
        ("AuthorizationHeaderMalformed", "the bucket is in another region: set upload.region"),
        ("PermanentRedirect", "the bucket is in another region: set upload.region"),
        ("QuotaExceeded", "make room there"),
        ("AccountProblem", "mend it with the provider"),
    ],
)
def test_a_refusal_is_told_by_its_own_name_with_what_to_do(server, file, code, advice):
    """A HEAD comes first and has no body: it showed `403 Forbidden` or `400 Bad Request` for all of these."""
    server.refusal = code
    for work in (store_of(server).holds, lambda one: store_of(server).put([one])):
        with pytest.raises(UserError, match=f"s3://corpora/my prefix: {code}: told: {code}: .*{advice}"):
            work(file)


def test_credentials_that_may_only_write_are_enough(server, file):
    server.readable = False
    store = store_of(server)
    assert not store.holds(file)
    store.put([file])
    assert server.objects["/corpora/my prefix/a/part"][0] == b"bytes of a part"
    server.refusal = "AccessDenied"
    with pytest.raises(UserError, match="AccessDenied: told: AccessDenied: .*s3:PutObject"):
        store.put([file])


def test_a_bucket_that_is_not_there(server, file):
    server.refusal = "NoSuchBucket"
    with pytest.raises(UserError, match=r"NoSuchBucket: .*make the bucket, or check upload\.target"):
        store_of(server).put([file])


def test_a_bucket_that_can_not_be(file):
    with pytest.raises(UserError, match=r"s3://No_Bucket!/x: S3 allows no such name of a bucket: check upload\.target"):
        open_store("s3://No_Bucket!/x", Upload(region="us-east-1")).holds(file)


def test_an_endpoint_that_redirects_everything(server, file):
    server.redirects = True
    with pytest.raises(UserError, match=r"the server redirects every request: check upload\.endpoint_url"):
        store_of(server).holds(file)


def test_what_another_attempt_may_cure_is_no_mistake_of_the_user(server, file):
    server.refusal = "InvalidArgument"
    with pytest.raises(TransferError, match="put_object: InvalidArgument told: InvalidArgument"):
        store_of(server).put([file])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"endpoint_url": "localhost:9000"},
            r"s3://corpora/x: Invalid endpoint: localhost:9000: check upload\.endpoint",
        ),
        ({"endpoint_url": "http://127.0.0.1:1", "region": "no region"}, r"s3://corpora/x: .*no region.*check upload\."),
    ],
)
def test_settings_that_no_client_can_be_made_of(settings, says):
    with pytest.raises(UserError, match=says):
        open_store("s3://corpora/x", Upload(**settings))


def test_credentials_that_are_not_there_or_broken(server, file, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="Unable to locate credentials: check AWS_ACCESS_KEY_ID"):
        store_of(server).holds(file)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UserError, match=r"profile \(nobody\) could not be found: check AWS_ACCESS_KEY_ID"):
        store_of(server).holds(file)
    monkeypatch.delenv("AWS_PROFILE")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default\naws_access_key_id = A\n")
    with pytest.raises(UserError, match="Unable to parse config file: .*credentials"):
        store_of(server).holds(file)
