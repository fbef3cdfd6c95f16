"""Where a file came from: digests and the provenance that every shard carries in its metadata."""

import functools
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import orjson

PROJECT = Path(__file__).resolve().parents[3]


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces. Equal values, equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def digest(value: Any) -> str:
    """First 32 hex digits (128 bits) of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]


@functools.cache
def code_version() -> str:
    """Git commit of this checkout (with `+` when it has local changes), or a digest of the code.

    Provenance only: it is recorded, never compared to decide that something is stale.
    """
    git = ["git", "-C", str(PROJECT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "scripts"], capture_output=True, text=True, check=True)
        return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        code = hashlib.sha256()
        for path in sorted((PROJECT / "scripts").rglob("*.py")):
            code.update(path.read_bytes())
        return f"code-{code.hexdigest()[:12]}"


def same_tokenizer(first: dict, second: dict) -> bool:
    """Whether ids of two targets, told as provenance tells them, mean the same; True where one doesn't say."""
    hashes = {target["tokenizer_hash"] for target in (first, second) if target.get("tokenizer_hash")}
    return len(hashes) < 2


def differences(recorded: dict, current: dict, prefix: str = "") -> list[str]:
    """Name every field whose value differs: `sampling.temperature: 0.7 -> 1.0`."""
    found = []
    for key in sorted(recorded.keys() | current.keys()):
        name = f"{prefix}{key}"
        old, new = recorded.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.")
        elif old != new:
            found.append(f"{name}: {old!r} -> {new!r}")
    return found
