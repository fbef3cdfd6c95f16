"""What must not be shown: keys and passwords in addresses."""

from urllib.parse import urlsplit, urlunsplit


def without_secrets(url: str) -> str:
    """The URL without user, password and query, which may hold keys."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
