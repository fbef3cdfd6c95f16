"""A dataset repository of the Hugging Face hub."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.stores import hub_calls
from scripts.lib.stores.base import File, TransferError


class HubStore:
    """A dataset repository of the Hugging Face hub. Its token comes from where huggingface_hub looks for it."""

    batch = 50  # the hub limits commits per hour

    def __init__(self, url: str, api: Any = None) -> None:
        """`url`: hf:owner/name. `api`: an HfApi, for tests."""
        import huggingface_hub

        self.url = url
        self.repository = url.removeprefix("hf:").strip("/")
        self._api = api or huggingface_hub.HfApi()
        self._made = False

    def _call(self, operation: str, **arguments: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        try:
            method = getattr(self._api, operation)
            return hub_calls.call(lambda: method(repo_id=self.repository, repo_type="dataset", **arguments), self.url)
        except RepositoryNotFoundError:
            raise UserError(f"{self.url}: no such repository, or no right to it: check HF_TOKEN") from None
        except (HfHubHTTPError, OSError) as error:
            told = f"{self.url}: {' '.join(str(error).split())[:300]}"
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
                raise UserError(f"{told}: check that HF_TOKEN may write there") from None
            raise TransferError(told) from None

    def _ready(self) -> None:
        if not self._made:
            self._call("create_repo", private=True, exist_ok=True)
            self._made = True

    def holds(self, file: File) -> bool:
        self._ready()
        for one in self._call("get_paths_info", paths=[file.key]):
            if one.size == file.size:
                lfs = getattr(one, "lfs", None)
                return lfs.sha256 == file.sha256 if lfs else one.blob_id == _git_blob(file.path)
        return False

    def put(self, files: Sequence[File]) -> None:
        from huggingface_hub import CommitOperationAdd

        self._ready()
        operations = [CommitOperationAdd(path_in_repo=file.key, path_or_fileobj=file.path) for file in files]
        self._call("create_commit", operations=operations, commit_message=f"Add {len(files)} files")
        for file in files:
            if not self.holds(file):
                raise TransferError(f"{self.url}/{file.key}: the hub holds other bytes than were sent")

    def get(self, key: str, path: Path) -> None:
        cached = self._call("hf_hub_download", filename=key)
        durable.write_bytes(path, Path(cached).read_bytes())

    def keys(self, prefix: str) -> list[str]:
        self._ready()
        return sorted(key for key in self._call("list_repo_files") if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self._call("delete_file", path_in_repo=key)


def _git_blob(path: Path) -> str:
    """Git's name of a file's content: what the hub tells for files that it keeps in git itself."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
