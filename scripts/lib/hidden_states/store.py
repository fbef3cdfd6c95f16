"""The files of samples: found again by name and checksum, written whole, set aside when no longer chosen.

    data/ab/{name}.safetensors      finished samples: what a trainer reads
    parts/ab/{name}.safetensors     samples that lack a capture that needs other servers
    unused/ab/{name}.safetensors    finished samples that are not chosen now; taken back when they are

Each file says in its own header which sample, model and layers it belongs to and what its checksum is, so
nothing else has to be kept to go on after a kill.
"""

import hashlib
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.lib.core import durable
from scripts.lib.core.provenance import digest
from scripts.lib.hidden_states.plan import CapturePlan
from scripts.lib.hidden_states.tensor_file import Damaged, pack, read

_PLAIN = re.compile(r"([0-9a-f]{32})(?:/(\d+))?")
_SUFFIX = ".safetensors"


@dataclass(slots=True)
class CorpusRow:
    """What a file needs of a sample."""

    id: str
    input_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # int8 [tokens]


@dataclass(slots=True)
class Stored:
    """A finished file, as the manifest lists it."""

    id: str
    file: str  # relative to the folder
    sha256: str
    bytes: int
    tokens: int
    engine: str


def file_name(sample: str) -> str:
    """A name that any file system takes, in a folder of its first two characters."""
    plain = _PLAIN.fullmatch(sample)
    name = (plain[1] + (f"-{plain[2]}" if plain[2] else "")) if plain else digest(sample)
    return f"{name[:2]}/{name}{_SUFFIX}"


class StateFiles:
    """The folder of one plan."""

    def __init__(self, folder: Path, plan: CapturePlan) -> None:
        self.folder, self.plan = folder, plan
        self.data, self.parts, self.unused = folder / "data", folder / "parts", folder / "unused"

    def tidy(self, chosen: Container[str]) -> int:
        """Remove what a killed writer left; set finished samples aside that are not `chosen` (file names).

        Returns how many were set aside.
        """
        for remains in self.folder.glob(f"*/*/.*{durable.TEMPORARY_SUFFIX}"):
            remains.unlink(missing_ok=True)
        aside = 0
        for path in _files(self.data):
            if f"{path.parent.name}/{path.name}" not in chosen:
                _move(path, self.unused / path.parent.name / path.name)
                aside += 1
        return aside

    def find(self, row: CorpusRow) -> Stored | None:
        """The row's finished file when it is there and whole; it is read to its last byte."""
        name = file_name(row.id)
        for path in (self.data / name, self.unused / name):
            stored = self._finished(row, path)
            if stored is None:
                continue
            if path != self.data / name:
                _move(path, self.data / name)
            return stored
        return None

    def part(self, row: CorpusRow) -> dict[str, np.ndarray]:
        """The states that earlier captures of this row have left, by tensor; {} when there are none."""
        path = self.parts / file_name(row.id)
        try:
            file, _ = read(path)
        except (FileNotFoundError, Damaged):
            return {}
        return self._states(file.tensors) if file.metadata.get("key") == self._key(row, finished=False) else {}

    def write(self, row: CorpusRow, states: dict[str, np.ndarray], engine: str) -> Stored | None:
        """Keep a row's states: as a finished file when they are all there, else as a part (returns None)."""
        name = file_name(row.id)
        finished = len(states) == len(self.plan.captures)
        path = (self.data if finished else self.parts) / name
        tensors = {
            **states,
            "input_ids": row.input_ids.astype(np.int64),
            "loss_mask": row.loss_mask.astype(np.int64),
        }
        pieces = pack(tensors, {"id": row.id, "key": self._key(row, finished), "engine": engine})
        checksum = hashlib.sha256()
        with durable.replacing(path) as temporary, open(temporary, "wb") as file:
            for piece in pieces:
                checksum.update(piece)
                file.write(piece)
        if not finished:
            return None
        (self.parts / name).unlink(missing_ok=True)
        size = sum(len(piece) for piece in pieces)
        return Stored(row.id, f"data/{name}", checksum.hexdigest(), size, len(row.input_ids), engine)

    def forget(self, sample: str, tensor: str) -> None:
        """Drop one capture of a sample, whose server turned out to be broken; its other states stay, as a part."""
        name = file_name(sample)
        for path in (self.data / name, self.parts / name):
            try:
                file, _ = read(path)
            except (FileNotFoundError, Damaged):
                continue
            states = self._states(file.tensors)
            if states.pop(tensor, None) is None:
                continue
            path.unlink()
            if states:
                row = CorpusRow(sample, file.tensors["input_ids"], file.tensors["loss_mask"])
                self.write(row, states, file.metadata["engine"])

    def clear_parts(self, keep: Container[str]) -> None:
        """Remove the parts that no sample needs any more; `keep` are file names."""
        for path in _files(self.parts):
            if f"{path.parent.name}/{path.name}" not in keep:
                path.unlink()

    def _finished(self, row: CorpusRow, path: Path) -> Stored | None:
        try:
            file, sha256 = read(path)
        except (FileNotFoundError, Damaged):
            return None
        if file.metadata.get("key") != self._key(row, finished=True):
            return None
        name = f"data/{path.parent.name}/{path.name}"
        return Stored(row.id, name, sha256, path.stat().st_size, len(row.input_ids), file.metadata["engine"])

    def _key(self, row: CorpusRow, finished: bool) -> str:
        """What a file must say to be this row's under this plan."""
        ids = hashlib.sha256(row.input_ids.astype("<i8").tobytes() + row.loss_mask.astype("<i8").tobytes())
        return digest([self.plan.identity, row.id, ids.hexdigest(), finished])

    def _states(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = {capture.tensor for capture in self.plan.captures}
        return {name: tensor for name, tensor in tensors.items() if name in names}


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob(f"*/*{_SUFFIX}"))


def _move(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, to)
    durable.fsync_directory(to.parent)
