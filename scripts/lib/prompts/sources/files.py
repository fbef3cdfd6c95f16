"""Files on this machine that a source names: a file, a glob, a folder."""

import glob
import os

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.folders import files_below, files_of_pattern, no_files
from scripts.lib.prompts.sources.reading import LocalFile
from scripts.lib.prompts.sources.rows import kind_of


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


def local_file(path: str) -> LocalFile:
    """A file of this machine as a part of a source."""
    return LocalFile(path, jumps_about(path))


def jumps_about(name: str) -> bool:
    """Whether the reader of a file of that name doesn't read it from its beginning to its end."""
    return kind_of(name) in ("parquet", "arrow")
