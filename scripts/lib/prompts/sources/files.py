"""Files on this machine that a source names: a file, a glob, a folder."""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.folders import files_below, files_of_pattern, no_files


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
    if os.path.isfile(path):
        return [path]
    try:
        found = files_below(path) if os.path.isdir(path) else files_of_pattern(path)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not found:
        problem = (
            no_files(path) if os.path.isdir(path) else "no file matches" if glob.has_magic(path) else "no such file"
        )
        raise UserError(f"{where}: {source}: {problem}")
    return found


def local_file(path: str) -> SourceFile:
    """A file of this machine as a part of a source."""

    def describe() -> dict[str, Any]:
        return {"size": os.path.getsize(path), "sha256": durable.sha256_file(path)}

    return SourceFile(path, lambda: open(path, "rb"), describe)
