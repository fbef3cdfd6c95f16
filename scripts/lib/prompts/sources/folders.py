"""Data files below a folder, and those that a pattern matches: all of them, each once.

Links are followed, into folders too: shards lie on other disks, and a pattern follows them as well. A link that leads
nowhere may stand for any number of rows (git-annex, a disk that isn't mounted), so it stops the run.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.prompts.sources.rows import kind_of

# What `datasets` writes beside its data.
BOOKKEEPING = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
STATE = "state.json"


def files_below(folder: str) -> list[str]:
    """Data files below a folder, sorted; names that begin with `.` or `_` are left out. Raises UserError."""
    files = _walk(folder, lambda name: not name.startswith((".", "_")))
    return each_once(without_bookkeeping(path for path in files if kind_of(path)))


def files_of_pattern(pattern: str) -> list[str]:
    """Files that a glob matches, sorted. Raises UserError for one that can't be had."""
    matches = _matching(pattern) if "**" in pattern.split("/") else glob.glob(pattern)
    for path in matches:
        _refuse_dead_link(path)
    return each_once(without_bookkeeping(path for path in matches if os.path.isfile(path)))


def _matching(pattern: str) -> list[str]:
    """As `glob.glob(pattern, recursive=True)`, which goes round in circles of links until their path is too long."""
    from fsspec.utils import glob_translate  # takes a while

    parts = pattern.split("/")
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    base = "/".join(parts[:fixed])
    asks_hidden = any(part.startswith(".") for part in parts[fixed:])
    matches = re.compile(glob_translate("/".join(part.replace("**", "*") if part != "**" else part for part in parts)))
    files = _walk(
        base or ("/" if pattern.startswith("/") else "."), lambda name: asks_hidden or not name.startswith(".")
    )
    paths = (path if base else path.removeprefix("./") for path in files)
    return [path for path in paths if matches.match(path)]


def _walk(folder: str, wanted: Callable[[str], bool], above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Files below a folder, also by way of links that don't lead back up."""
    if not os.path.isdir(folder) or (identity := _identity(folder)) in above:
        return
    try:
        entries = sorted((entry for entry in os.scandir(folder) if wanted(entry.name)), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: can't be listed: {os.strerror(error.errno or 0).lower()}") from None
    _refuse_unfinished(folder, {entry.name for entry in entries})
    for entry in entries:
        _refuse_dead_link(entry.path)
        if not os.path.isdir(entry.path):
            yield entry.path
        else:
            yield from _walk(entry.path, wanted, (*above, identity))


def each_once(paths: Iterable[str]) -> list[str]:
    """The paths, sorted, of files that are reached in several ways only one: a link gives way to the file itself."""
    by_file: dict[tuple[int, int], str] = {}
    for path in sorted(paths, key=lambda path: (os.path.realpath(path) != os.path.abspath(path), path)):
        by_file.setdefault(_identity(path), path)
    return sorted(by_file.values())


def without_bookkeeping(paths: Iterable[str]) -> list[str]:
    """The paths without what `datasets` keeps beside its rows: descriptions, and the cached results of `map`."""
    states: dict[Path, set[str] | None] = {}
    kept = []
    for path in paths:
        folder, name = Path(path).parent, Path(path).name
        if folder not in states:
            states[folder] = _saved_files(folder)
        saved = states[folder]
        if name in BOOKKEEPING or (
            saved is not None and (name == STATE or (kind_of(name) == "arrow" and name not in saved))
        ):
            continue
        kept.append(path)
    return kept


def _saved_files(folder: Path) -> set[str] | None:
    """Names of the data files of a folder that `save_to_disk` wrote; None for any other. Raises UserError."""
    try:
        state = parse_json((folder / STATE).read_bytes())
    except (OSError, NotJson):
        return None
    files = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(files, list):
        return None
    names = {str(file.get("filename")) for file in files if isinstance(file, dict)}
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise UserError(
            f"{folder / missing[0]}: no such file, though {folder / STATE} names it: fetch the folder again"
        )
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UserError(f"{folder}: holds a selection of its rows by index: save it again after flatten_indices()")
    return names


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _refuse_dead_link(path: str) -> None:
    """Raise UserError for a link to nothing where data may be meant: a known ending, or none, as folders have."""
    name = os.path.basename(path)
    if not os.path.islink(path) or os.path.exists(path) or (kind_of(name) is None and "." in name):
        return
    target = os.readlink(path)
    advice = "run `git annex get`" if "annex/objects" in target else "mend the link, or leave it out of `source`"
    raise UserError(f"{path}: a link to {target}, which isn't there: {advice}")


def _refuse_unfinished(folder: str, names: set[str]) -> None:
    """Raise UserError where data lies elsewhere: with DVC, or in a download that hasn't ended."""
    for name in sorted(names):
        stem, ending = os.path.splitext(name)
        if ending == ".dvc" and stem not in names and (kind_of(stem) or "." not in stem):
            raise UserError(f"{os.path.join(folder, stem)}: lies with DVC: run `dvc pull`")
        if ending in (".aria2", ".part", ".crdownload", ".incomplete") and kind_of(stem):
            raise UserError(f"{os.path.join(folder, name)}: a download that hasn't ended: let it, or remove the file")


def no_files(folder: str) -> str:
    """Why a folder holds no data files."""
    below = [name for _, folders, files in os.walk(folder) for name in folders + files]
    hidden = sum(name.startswith((".", "_")) for name in below)
    return "the folder holds no data files" + (
        f"; names that begin with . or _ aren't read ({hidden})" if hidden else ""
    )
