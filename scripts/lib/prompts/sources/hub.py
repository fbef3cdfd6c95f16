"""Datasets on the Hugging Face Hub: `hf:owner/name`, or one file or glob of it: `hf:owner/name/data/*.parquet`.

Files are downloaded one by one through huggingface_hub into its cache: an interrupted download goes on where it
stopped, `HF_HUB_OFFLINE=1` reads the cache alone. The token comes from the environment (`HF_TOKEN`) only.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
import yaml
from huggingface_hub import constants, errors
from huggingface_hub.utils import disable_progress_bars

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.files import jumps_about
from scripts.lib.prompts.sources.presets import Plan
from scripts.lib.prompts.sources.reading import LocalFile, SourceFile
from scripts.lib.prompts.sources.splits import choose_files, data_files, matching
from scripts.lib.stores import hub_calls
from scripts.lib.stores.hub_calls import token

README = "README.md"
STANDALONE = ".huggingface.yaml"
_NUMBERED = re.compile(r"(.*)-\d{5}-of-(\d{5})[-.][^/]*")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)


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
        paths = [path[0]] if path[0] in repository.files else matching(list(repository.files), path[0])
        if not paths:  # a folder, as on this machine
            paths = data_files([file for file in repository.files if file.startswith(path[0].rstrip("/") + "/")])
        if not paths:
            raise UserError(f"{where}: {source}: no such file; there are {_some(data_files(list(repository.files)))}")
    else:
        card = _card(repository)
        paths = choose_files(list(repository.files), card, plan.hub_config, plan.split, f"{where}: {source}")
    if constants.is_offline_mode():
        _refuse_holes(paths, f"{where}: {source}")
    return [HubFile(repository, path) for path in sorted(paths)]


def _refuse_holes(paths: list[str], where: str) -> None:
    """Raise UserError where numbered files are not all there: a cache holds what was asked for, not what there is."""
    numbers = [match for path in paths if (match := _NUMBERED.fullmatch(path))]
    counts = Counter((match[1], match[2]) for match in numbers)
    for (stem, wanted), there in counts.items():
        if there < int(wanted):
            raise UserError(
                f"{where}: {there} of the {int(wanted)} files {stem}-*-of-{wanted} are in the cache, and HF_HUB_OFFLINE is "
                "set: fetch the others without it"
            )


def find_repository(name: str, revision: str | None, where: str) -> Repository:
    """The repository at a revision (branch, tag or commit; none: main). Raises UserError."""
    if constants.is_offline_mode():
        return _cached_repository(name, revision or "main", where)
    try:
        api = huggingface_hub.HfApi(token=token())
        info = hub_calls.call(lambda: api.dataset_info(name, revision=revision, files_metadata=True), f"hf:{name}")
    except (OSError, errors.HTTPError, ValueError) as error:
        raise hub_calls.refusal(error, f"{where}: hf:{name}", revision) from None
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


class HubFile(LocalFile):
    """A file of a repository, in the cache once it is opened."""

    def __init__(self, repository: Repository, path: str):
        super().__init__("", jumps_about(path), name=f"hf:{repository.name}/{path}")
        self._repository, self._path_there = repository, path

    def open(self) -> BinaryIO:
        self.path = cached_copy(self._repository, self._path_there)
        return super().open()

    def describe(self) -> dict[str, Any]:
        listed = self._repository.files[self._path_there]
        if self.path:
            read = super().describe()
            if any(read[key] != listed[key] for key in read.keys() & listed.keys()):
                raise UserError(f"{self.name}: {self.path} is not what the Hub lists: remove it and run again")
            listed = listed | read
        return {"revision": self._repository.revision, **listed}


def cached_copy(repository: Repository, path: str) -> str:
    """Local path of a file, from the cache or downloaded into it. Raises UserError."""
    try:
        return huggingface_hub.hf_hub_download(
            repository.name, path, repo_type="dataset", revision=repository.revision, token=token()
        )
    except (OSError, errors.HTTPError, ValueError) as error:
        raise hub_calls.refusal(
            error, f"{repository.where}: hf:{repository.name}/{path}", repository.revision
        ) from None


def _card(repository: Repository) -> dict[str, Any]:
    """The YAML front matter of the dataset card, with that of a file of its own laid over it; {} when there is none."""
    texts = {}
    for name in (README, STANDALONE):
        if name in repository.files:
            texts[name] = Path(cached_copy(repository, name)).read_text(encoding="utf-8", errors="replace")
    front = _FRONT_MATTER.match(texts.get(README, ""))
    return _yaml(front[1] if front else "") | _yaml(texts.get(STANDALONE, ""))


def _yaml(text: str) -> dict[str, Any]:
    try:
        card = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # a card that the Hub itself wouldn't take: names of files are left
    return card if isinstance(card, dict) else {}


def _some(paths: list[str], limit: int = 10) -> str:
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more or "none"
