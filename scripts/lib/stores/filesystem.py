"""A folder, or whatever fsspec has a driver for."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import fsspec

from scripts.lib.core import durable
from scripts.lib.stores.base import CHUNK, File, TransferError


class FilesystemStore:
    """A folder, or whatever fsspec has a driver for. Verified by reading back."""

    batch = 1

    def __init__(self, url: str) -> None:
        """Raises ValueError or ImportError for a URL without a driver."""
        self.url = url.rstrip("/")
        self._files, self._root = fsspec.url_to_fs(self.url)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _sha256(self, key: str) -> str:
        value = hashlib.sha256()
        with self._files.open(self._path(key), "rb") as file:
            while chunk := file.read(CHUNK):
                value.update(chunk)
        return value.hexdigest()

    def holds(self, file: File) -> bool:
        try:
            return self._files.info(self._path(file.key))["size"] == file.size and self._sha256(file.key) == file.sha256
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TransferError(f"{self.url}/{file.key}: {error}") from None

    def put(self, files: Sequence[File]) -> None:
        for file in files:
            destination = self._path(file.key)
            # Under another name first: whoever reads this folder sees whole files only.
            folder, _, name = destination.rpartition("/")
            temporary = f"{folder}/.{name}{durable.TEMPORARY_SUFFIX}"
            try:
                self._files.makedirs(folder, exist_ok=True)
                self._files.put_file(str(file.path), temporary)
                self._files.mv(temporary, destination)
                if not self.holds(file):
                    raise TransferError(f"{self.url}/{file.key}: the bytes read back are not those that were sent")
            except OSError as error:
                if not file.path.exists():
                    raise
                raise TransferError(f"{self.url}/{file.key}: {error}") from None

    def get(self, key: str, path: Path) -> None:
        try:
            with durable.replacing(path) as temporary:
                self._files.get_file(self._path(key), str(temporary))
        except FileNotFoundError:
            raise TransferError(f"{self.url}/{key}: is not there") from None

    def keys(self, prefix: str) -> list[str]:
        start = f"{self._path('')}"
        found = [path.removeprefix(start) for path in self._files.find(self._root)]
        return sorted(key for key in found if key.startswith(prefix) and not key.endswith(durable.TEMPORARY_SUFFIX))

    def delete(self, key: str) -> None:
        try:
            self._files.rm_file(self._path(key))
        except FileNotFoundError:
            pass
