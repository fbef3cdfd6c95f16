"""What must not be shown: keys and passwords, in addresses and in what servers echo."""

import functools
import hashlib
import json
import os
import re
from urllib.parse import quote, urlsplit, urlunsplit

REDACTED = "[redacted]"
# Variables that hold credentials by their names (HF_TOKEN, OPENROUTER_API_KEY, AWS_SECRET_ACCESS_KEY, ...).
_CREDENTIAL = re.compile(r"(API_?KEY|ACCESS_KEY|SECRET|TOKEN|PASSWORD|PASSWD)$", re.IGNORECASE)
_LONG = 16  # characters of a credential that no text holds by accident
_SHORTEST = 8

_told: set[str] = set()


def keep_secret(credential: str) -> None:
    """Have a credential hidden wherever it is echoed: one that no variable's name gives away."""
    _told.add(credential)
    _spellings.cache_clear()


def redacted(text: str) -> str:
    """The text without the credentials that this process knows."""
    for spelling, _ in _spellings():
        if spelling in text:
            text = text.replace(spelling, REDACTED)
    return text


def redacted_bytes(data: bytes) -> bytes:
    """As `redacted`, of what a server sends."""
    for _, spelling in _spellings():
        if spelling in data:
            data = data.replace(spelling, REDACTED.encode())
    return data


@functools.lru_cache(maxsize=1)
def _spellings() -> list[tuple[str, bytes]]:
    """The forms in which credentials come back, longer ones first. Read once: every reply is looked through."""
    named = {value for name, value in os.environ.items() if _CREDENTIAL.search(name)}
    known = {text.strip() for text in named | _told}
    forms = {
        form for text in known if _is_secret(text) for form in (text, json.dumps(text)[1:-1], quote(text, safe=""))
    }
    return [(form, form.encode()) for form in sorted(forms, key=lambda form: (-len(form), form))]


def _is_secret(value: str) -> bool:
    """Whether a text would not stand in an answer by itself. `EMPTY` and `token` are keys of servers that want none."""
    if value.startswith(("/", "~")):  # where a credential lies
        return False
    return len(value) >= _LONG or (len(value) >= _SHORTEST and not value.isalpha() and not value.isdigit())


def without_secrets(url: str) -> str:
    """The URL without user, password and query, which may hold keys."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def with_digests(url: str) -> str:
    """The URL with a digest of its query, which may hold keys and may as well say which file is meant; without a user."""
    query = urlsplit(url).query
    return without_secrets(url) + (f"?sha256:{hashlib.sha256(query.encode()).hexdigest()[:16]}" if query else "")
