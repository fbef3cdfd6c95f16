"""Datasets on the Hugging Face Hub: `hf:owner/name`, or one file or glob of it: `hf:owner/name/data/*.parquet`.

Which files make a configuration and a split is read from the dataset card, else from folder and file names, as
https://huggingface.co/docs/hub/datasets-manual-configuration and .../datasets-file-names-and-splits describe.
Files are downloaded one by one through huggingface_hub into its cache: an interrupted download goes on where it
stopped, `HF_HUB_OFFLINE=1` reads the cache alone. The token comes from the environment (`HF_TOKEN`) only.
"""

import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
import yaml
from huggingface_hub import constants, errors
from huggingface_hub.utils import disable_progress_bars

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.files import SourceFile
from scripts.lib.prompts.sources.presets import Plan
from scripts.lib.prompts.sources.rows import kind_of

README = "README.md"
_NOT_DATA = re.compile(r"(^|/)(dataset_infos?|state|dataset_dict|config|metadata)\.json$|(^|/)[._]")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_NUMBERED = re.compile(r"(?:^|/)(\w+?)-\d{5}-of-\d{5}[.-]")
_SPLIT_NAMES = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")


@dataclass(frozen=True)
class Repository:
    """A dataset repository at one commit. `files`: path -> what the Hub says of it."""

    name: str
    revision: str
    files: dict[str, dict[str, Any]]
    where: str  # the config key, for messages


def hub_files(source: str, plan: Plan, where: str) -> list[SourceFile]:
    """The files of the plan's configuration and split. Raises UserError that says what there is instead."""
    owner, name, *path = [*source.removeprefix("hf:").split("/", 2), ""][:3]
    if not owner or not name:
        raise UserError(f"{where}: {source}: a Hub dataset is written `hf:owner/name`")
    disable_progress_bars()
    repository = find_repository(f"{owner}/{name}", plan.revision, where)
    if path[0]:
        paths = fnmatch.filter(repository.files, path[0])
        if not paths:
            raise UserError(f"{where}: {source}: no such file; there are {_some(data_files(repository.files))}")
    else:
        card = _card(repository) if README in repository.files else {}
        paths = choose_files(list(repository.files), card, plan.hub_config, plan.split, f"{where}: {source}")
    return [_file(repository, path) for path in sorted(paths)]


def find_repository(name: str, revision: str | None, where: str) -> Repository:
    """The repository at a revision (branch, tag or commit; none: main). Raises UserError."""
    if constants.is_offline_mode():
        return _cached_repository(name, revision or "main", where)
    try:
        info = huggingface_hub.HfApi(token=token()).dataset_info(name, revision=revision, files_metadata=True)
    except (OSError, errors.HTTPError, ValueError) as error:
        raise _refusal(error, f"{where}: hf:{name}", revision) from None
    files = {
        file.rfilename: {
            "size": file.size,
            **({"sha256": file.lfs.sha256} if file.lfs else {"blob": file.blob_id}),
        }
        for file in info.siblings or []
    }
    return Repository(name, info.sha or "", files, where)


def _cached_repository(name: str, revision: str, where: str) -> Repository:
    """What the local cache holds: `datasets--owner--name/{refs/{revision},snapshots/{commit}/...}`."""
    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        raise UserError(f"{where}: hf:{name}: revision {revision} is not in the cache, and HF_HUB_OFFLINE is set")
    files = {
        str(path.relative_to(snapshot)): {"size": path.stat().st_size}
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    }
    return Repository(name, commit, files, where)


def token() -> str | bool:
    """The token of the environment; False keeps huggingface_hub from using one that is stored on disk."""
    return os.environ.get("HF_TOKEN") or False


def _file(repository: Repository, path: str) -> SourceFile:
    name = f"hf:{repository.name}/{path}"

    def open_file() -> BinaryIO:
        return open(download(repository, path), "rb")

    return SourceFile(name, open_file, lambda: {"revision": repository.revision, **repository.files[path]})


def download(repository: Repository, path: str) -> str:
    """Local path of a file, from the cache or downloaded into it. Raises UserError."""
    try:
        return huggingface_hub.hf_hub_download(
            repository.name, path, repo_type="dataset", revision=repository.revision, token=token()
        )
    except (OSError, errors.HTTPError, ValueError) as error:
        raise _refusal(error, f"{repository.where}: hf:{repository.name}/{path}", repository.revision) from None


def _refusal(error: Exception, what: str, revision: str | None) -> UserError:
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{what}: gated: accept its terms on the Hub and set HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{what}: no revision {revision}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"{what}: no such dataset, or a private one: check the name, or set HF_TOKEN")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{what}: not a dataset's name")
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(
        f"{what}: can't be reached ({text}): run again to go on where it stopped, or set HF_HUB_OFFLINE=1 to use what is cached"
    )


def _card(repository: Repository) -> dict[str, Any]:
    """The YAML front matter of the dataset card; {} when there is none."""
    text = Path(download(repository, README)).read_text(encoding="utf-8", errors="replace")
    found = _FRONT_MATTER.match(text)
    try:
        card = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError:
        return {}  # a card that the Hub itself wouldn't take: names of files are left
    return card if isinstance(card, dict) else {}


def data_files(paths: Any) -> list[str]:
    """Those of a repository's paths that can hold rows."""
    return [path for path in paths if kind_of(path) and not _NOT_DATA.search(path) and not path.endswith(".txt")]


def choose_files(
    paths: list[str], card: dict[str, Any], configuration: str | None, split: str | None, where: str
) -> list[str]:
    """Paths of one configuration and of a split (`train`, or several: `code+math`).

    Raises UserError that names what there is, when the choice is open or doesn't exist.
    """
    configured = [one for one in card.get("configs") or [] if isinstance(one, dict) and one.get("data_files")]
    if configured:
        splits = _card_splits(paths, _pick(configured, configuration, where))
    else:
        splits = _named_splits(paths, configuration, where)
    if split is None:
        split = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else None
    if split is None:
        raise UserError(f"{where}: needs `split`: {', '.join(splits)}")
    missing = [name for name in split.split("+") if name not in splits]
    if missing:
        raise UserError(f"{where}: no split `{missing[0]}`; there are {', '.join(splits)}")
    return [path for name in split.split("+") for path in splits[name]]


def _pick(configured: list[dict], configuration: str | None, where: str) -> dict:
    by_name = {str(one.get("config_name", "default")): one for one in configured}
    if configuration is None:
        defaults = [name for name, one in by_name.items() if one.get("default")] or ["default"]
        configuration = next(iter(by_name)) if len(by_name) == 1 else defaults[0] if defaults[0] in by_name else None
    if configuration is None:
        raise UserError(f"{where}: needs `hub_config`: {', '.join(by_name)}")
    if configuration not in by_name:
        raise UserError(f"{where}: no hub_config `{configuration}`; there are {', '.join(by_name)}")
    return by_name[configuration]


def _card_splits(paths: list[str], configured: dict) -> dict[str, list[str]]:
    """Split -> paths, of a configuration's `data_files` in any of the forms that a card may use."""
    entries = configured["data_files"]
    folder = str(configured.get("data_dir") or "").strip("/")
    if isinstance(entries, dict):
        entries = [{"split": split, "path": patterns} for split, patterns in entries.items()]
    if isinstance(entries, str) or all(isinstance(entry, str) for entry in entries):
        entries = [{"split": "train", "path": entries}]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        for pattern in patterns:
            full = f"{folder}/{pattern}" if folder else str(pattern).removeprefix("./")
            splits.setdefault(str(entry.get("split", "train")), []).extend(fnmatch.filter(paths, full))
    return splits


def _named_splits(paths: list[str], configuration: str | None, where: str) -> dict[str, list[str]]:
    """Split -> paths by folder and file names; everything is `train` where no name tells."""
    found = data_files(paths)
    if configuration not in (None, "default"):
        inside = [path for path in found if configuration in re.split(r"[/.]", path)]
        if not inside:
            folders = sorted({path.split("/")[0] for path in found if "/" in path})
            raise UserError(f"{where}: no hub_config `{configuration}`; there are {', '.join(folders) or 'none'}")
        found = inside
    if not found:
        raise UserError(f"{where}: holds no data files of a known kind")
    splits: dict[str, list[str]] = {}
    for path in found:
        if numbered := _NUMBERED.search(path):
            name = numbered[1]
        else:
            named = (name for name in _SPLIT_NAMES if re.search(rf"(^|[/._-]){name}([/._-]|$)", path))
            name = next(named, "train")
        splits.setdefault(name, []).append(path)
    return splits


def _some(paths: list[str], limit: int = 10) -> str:
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more or "none"
