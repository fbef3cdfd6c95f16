"""Files on this machine that a source names: a file, a glob, a folder."""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.rows import kind_of


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, wherever it lies.

    `name` is what people see in messages; `describe` says which bytes they were (for provenance): size, and digest or
    revision.
    """

    name: str
    open: Callable[[], BinaryIO]
    describe: Callable[[], dict[str, Any]]


def is_local(source: str) -> bool:
    """Whether a source names files of this machine, not of the Hub or a remote store."""
    return not source.startswith("hf:") and "://" not in source


def local_paths(source: str, where: str) -> list[str]:
    """Paths that a file, glob or folder stands for, sorted. Raises UserError (beginning with `where`)."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        found = sorted(
            str(file)
            for file in Path(path).rglob("*")
            if file.is_file() and kind_of(file.name) and not any(part.startswith((".", "_")) for part in file.parts)
        )
        if not found:
            raise UserError(f"{where}: {source}: the folder holds no data files")
        return found
    if os.path.isfile(path):
        return [path]
    found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
    if not found:
        problem = "no file matches" if glob.has_magic(path) else "no such file"
        raise UserError(f"{where}: {source}: {problem}")
    return found


def local_file(path: str) -> SourceFile:
    """A file of this machine as a part of a source."""

    def describe() -> dict[str, Any]:
        return {"size": os.path.getsize(path), "sha256": durable.sha256_file(path)}

    return SourceFile(path, lambda: open(path, "rb"), describe)
