"""Which files of a repository make a configuration and a split, by its card or by the names of folders and files.

`datasets` is the judge, as its `data_files.py` (5.2) resolves them; the rules are described in
https://huggingface.co/docs/hub/datasets-manual-configuration and .../datasets-file-names-and-splits.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fsspec.utils import glob_translate

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.folders import BOOKKEEPING
from scripts.lib.prompts.sources.rows import kind_of

# Split -> words for it in names of folders and files, between separators or at the ends.
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATOR = "[-._ 0-9]"
_NUMBERED = re.compile(r"data/([^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NOT_DATA = (*BOOKKEEPING, "README.md", "config.json", "state.json")
# In names of equal number the first wins.
_PREFERRED = ("parquet", "pq", "arrow", "feather", "jsonl", "ndjson", "json", "csv", "tsv")
_ALIKE = {"pq": "parquet", "feather": "arrow", "ndjson": "json", "jsonl": "json", "tsv": "csv"}
_ARCHIVES = re.compile(r"\.(zip|tar|tgz|7z|rar|lz4|tar\.\w+)$", re.IGNORECASE)


def matching(paths: Sequence[str], pattern: str) -> list[str]:
    """Those of a repository's paths that a pattern names: `*` stays in its folder, `**/` is any folder or none.

    Hidden files and `__special__` folders must be named by the pattern, as must what is no data by its name.
    """
    pattern = re.sub(r"(^|/)(\./)+", r"\1", pattern.strip())
    parts = [part if part == "**" else part.replace("**", "*") for part in pattern.split("/")]
    named = re.compile(glob_translate("/".join(parts)))
    asked = pattern.rpartition("/")[2]

    def is_asked_for(path: str) -> bool:
        name = path.rpartition("/")[2]
        if name in _NOT_DATA and name != asked:
            return False
        return _count(path, ".") == _count(pattern, ".") and _count(path, "__", -1) == _count(pattern, "__", -1)

    return [path for path in paths if named.match(path) and is_asked_for(path)]


def _count(path: str, prefix: str, end: int | None = None) -> int:
    return sum(part.startswith(prefix) and part not in (".", "..") for part in path.split("/")[:end])


def data_files(paths: Sequence[str]) -> list[str]:
    """Those of a repository's paths that can hold rows."""
    return [path for path in matching(paths, "**") if kind_of(path) not in (None, "text")]


def choose_files(
    paths: list[str], card: dict[str, Any], configuration: str | None, split: str | None, where: str
) -> list[str]:
    """Paths of one configuration and of a split (`train`, or several: `code+math`).

    Raises UserError that names what there is, when the choice is open or doesn't exist.
    """
    configured = [one for one in card.get("configs") or [] if isinstance(one, dict) and "config_name" in one]
    if not configured:
        return _of_names(_of_folder(data_files(paths), configuration, where), split, where)
    one = _pick(configured, configuration, where)
    folder = str(one.get("data_dir") or "").removeprefix("./").strip("/")
    inside = [path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")] if folder else paths
    if one.get("data_files"):
        found = _of_card(inside, one["data_files"], split, where)
    else:
        found = _of_names(data_files(inside), split, f"{where}: {folder}" if folder else where)
    return [f"{folder}/{path}" if folder else path for path in found]


def _of_card(paths: list[str], entries: Any, split: str | None, where: str) -> list[str]:
    """Paths of a split by a card's `data_files`, in any of the forms that it may have."""
    patterns = _patterns(entries)
    chosen = (pattern for name in _chosen(patterns, split, where) for pattern in patterns[name])
    return list(dict.fromkeys(path for pattern in chosen for path in _of_pattern(paths, pattern, where)))


def _of_names(found: list[str], split: str | None, where: str) -> list[str]:
    """Paths of a split by the names of folders and files."""
    splits = _named_splits(found, where)
    return list(dict.fromkeys(path for name in _chosen(splits, split, where) for path in splits[name]))


def _chosen(splits: Collection[str], split: str | None, where: str) -> list[str]:
    """Names among `splits` of those that are wanted. Raises UserError when the choice is open, or there is no such one."""
    if split is None:
        split = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else None
    if split is None:
        raise UserError(f"{where}: needs `split`: {', '.join(splits)}")
    return [_known(splits, name, where) for name in split.split("+")]


def _known(splits: Collection[str], name: str, where: str) -> str:
    if name in splits:
        return name
    for canonical, words in KEYWORDS.items():
        if name in words and canonical in splits:  # `dev`, which the names of files may say as well
            return canonical
    raise UserError(f"{where}: no split `{name}`; there are {', '.join(splits)}")


def _pick(configured: list[dict], configuration: str | None, where: str) -> dict:
    by_name = {str(one["config_name"]): one for one in configured}
    if configuration is None:
        defaults = [name for name, one in by_name.items() if one.get("default")] or ["default"]
        configuration = next(iter(by_name)) if len(by_name) == 1 else defaults[0] if defaults[0] in by_name else None
    if configuration is None:
        raise UserError(f"{where}: needs `hub_config`: {', '.join(by_name)}")
    if configuration not in by_name:
        raise UserError(f"{where}: no hub_config `{configuration}`; there are {', '.join(by_name)}")
    return by_name[configuration]


def _patterns(entries: Any) -> dict[str, list[str]]:
    """Split -> patterns."""
    if isinstance(entries, dict):
        entries = [{"split": split, "path": patterns} for split, patterns in entries.items()]
    if isinstance(entries, str) or all(isinstance(entry, str) for entry in entries):
        entries = [{"split": "train", "path": entries}]
    found: dict[str, list[str]] = {}
    for entry in entries:
        patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        found.setdefault(str(entry.get("split", "train")), []).extend(map(str, patterns))
    return found


def _of_pattern(paths: list[str], pattern: str, where: str) -> list[str]:
    """Data files that a card's pattern names. Raises UserError when there is none, or one that can't be read."""
    matched = matching(paths, pattern)
    archives = [path for path in matched if _ARCHIVES.search(path)]
    if archives:
        raise UserError(
            f"{where}: the card's `{pattern}` names {archives[0]}: unpack it, and name the files in `source`"
        )
    found = [path for path in matched if kind_of(path)]
    if not found:
        raise UserError(f"{where}: the card's `{pattern}` matches no data file")
    return found


def _of_folder(found: list[str], configuration: str | None, where: str) -> list[str]:
    """Data files of a configuration that no card names: those below its folder, or named so."""
    if configuration not in (None, "default"):
        inside = [path for path in found if configuration in re.split(r"[/.]", path)]
        if not inside:
            folders = sorted({path.split("/")[0] for path in found if "/" in path})
            raise UserError(f"{where}: no hub_config `{configuration}`; there are {', '.join(folders) or 'none'}")
        return inside
    return found


def _named_splits(found: list[str], where: str) -> dict[str, list[str]]:
    """Split -> paths by the names of numbered files, else of folders, else of files; `train` where no name tells.

    Where some names tell, those that don't are no data (a schema.json beside train.jsonl).
    """
    if not found:
        raise UserError(f"{where}: holds no data files of a known kind")
    numbered: dict[str, list[str]] = {}
    for path in found:
        if match := _NUMBERED.fullmatch(path):
            numbered.setdefault(match[1], []).append(path)
    if numbered:
        first = [name for name in KEYWORDS if name in numbered]
        return {name: _of_one_kind(numbered[name]) for name in [*first, *sorted(numbered.keys() - set(first))]}
    for is_named in (_in_folders, _in_file):
        splits = {
            split: [path for path in found if any(is_named(path, word) for word in words)]
            for split, words in KEYWORDS.items()
        }
        if any(splits.values()):
            return {split: _of_one_kind(paths) for split, paths in splits.items() if paths}
    return {"train": _of_one_kind(found)}


@functools.cache
def _word(word: str) -> Callable[[str], Any]:
    return re.compile(f"(?:.*{_SEPARATOR})?{word}(?:{_SEPARATOR}.*)?", re.DOTALL).fullmatch


def _in_folders(path: str, word: str) -> bool:
    return any(_word(word)(folder) for folder in path.split("/")[:-1])


def _in_file(path: str, word: str) -> bool:
    return _word(word)(path.rpartition("/")[2]) is not None


def _of_one_kind(paths: list[str]) -> list[str]:
    """The paths of the kind that most have: the same rows often lie there as CSV and as Parquet."""
    endings = [next(part for part in reversed(path.lower().split(".")) if part in _PREFERRED) for path in paths]
    counts = Counter(endings)
    best = max(counts, key=lambda ending: (counts[ending], -_PREFERRED.index(ending)))
    return [path for path, ending in zip(paths, endings) if _ALIKE.get(ending, ending) == _ALIKE.get(best, best)]
