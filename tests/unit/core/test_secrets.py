import pytest

from scripts.lib.core import secrets
from scripts.lib.core.secrets import keep_secret, redacted, redacted_bytes, with_digests, without_secrets


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """No credential but those that a test tells."""
    monkeypatch.setattr(secrets, "_told", set())
    secrets._spellings.cache_clear()
    yield monkeypatch
    secrets._spellings.cache_clear()


@pytest.mark.parametrize(
    "echoed",
    [
        "bad key sk-or/v1+a\\b=SECRET here",
        "bad key sk-or/v1+a\\\\b=SECRET here",  # in JSON
        "bad key sk-or%2Fv1%2Ba%5Cb%3DSECRET here",  # in a URL
        "sk-or/v1+a\\b=SECRETsk-or/v1+a\\b=SECRET",
    ],
)
def test_a_credential_is_hidden_however_it_is_spelled(echoed):
    keep_secret("sk-or/v1+a\\b=SECRET")
    assert "SECRET" not in redacted(echoed)
    assert "[redacted]" in redacted(echoed)
    assert redacted_bytes(echoed.encode()) == redacted(echoed).encode()


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENROUTER_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "apikey"])
def test_credentials_of_the_environment_are_known_by_their_names(name, known):
    known.setenv(name, "hunter2-and-more")
    assert redacted("a hunter2-and-more b") == "a [redacted] b"


@pytest.mark.parametrize("key", ["EMPTY", "token", "password", "12345678", "/run/secrets/key", "x"])
def test_what_stands_in_any_text_is_no_secret(key):
    """Servers that want no key get a word; an answer that holds it stays as it is."""
    keep_secret(key)
    assert redacted(f"a {key} b") == f"a {key} b"


def test_a_key_within_another_one_leaves_nothing_of_the_longer():
    keep_secret("sk-short-1")
    keep_secret("sk-short-1-and-longer")
    assert redacted("sk-short-1-and-longer") == "[redacted]"


def test_shown_urls_hold_no_secrets():
    assert without_secrets("https://me:pw@host:8/a/b.csv?X-Amz-Signature=x#y") == "https://host:8/a/b.csv"
    assert without_secrets("s3://bucket/a b.parquet") == "s3://bucket/a b.parquet"


def test_a_query_is_told_apart_without_being_told():
    one, other = (with_digests(f"https://me:pw@host/a.csv?file={name}&sig=secret") for name in "ab")
    assert one != other
    assert one.startswith("https://host/a.csv?sha256:")
    assert "secret" not in one
    assert with_digests("https://host/a.csv") == "https://host/a.csv"
