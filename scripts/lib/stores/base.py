"""What all stores share: the file to store, the interface, the error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CHUNK = 1 << 20


class TransferError(Exception):
    """A transfer failed for a reason that another attempt may cure. One line.

    What only people can mend (credentials, a bucket's name, a clock) is a UserError: the place takes nothing at all.
    """


@dataclass(slots=True)
class File:
    """A local file and where it goes.

    `memory` is kept between attempts, so that one can go on where another stopped; `save` makes it
    outlive this process.
    """

    path: Path
    key: str
    size: int
    sha256: str
    memory: dict[str, Any] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None


class FileStore(Protocol):
    """A place for files, addressed by keys with slashes."""

    url: str
    batch: int  # files that one `put` should get

    def holds(self, file: File) -> bool:
        """Whether the file is there, with these bytes."""

    def put(self, files: Sequence[File]) -> None:
        """FileStore files, verified. Raises TransferError; files stored before stay."""

    def get(self, key: str, path: Path) -> None:
        """Fetch a file to `path`, atomically. Raises TransferError when it isn't there."""

    def keys(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove a file; no error when it isn't there."""
