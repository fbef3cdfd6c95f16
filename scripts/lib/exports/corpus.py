"""What every export reads and tells: the corpus part by part, and the report of what was kept and lost."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa

from scripts.lib.core import durable, records
from scripts.lib.core.records import Sample
from scripts.lib.training import manifest

FILE_BYTES = 1 << 30  # of one JSON Lines file: SpecForge holds a whole file as Python lists


@dataclass(slots=True)
class Report:
    """The content of export.json. `read` = `rows`' samples + the sum of `left_out`."""

    format: str
    version: str
    read: int = 0  # samples of the corpus
    rows: int = 0  # written; a format may hold several rows for one sample
    files: list[str] = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)  # samples that the format can't hold, by reason
    lost: Counter = field(default_factory=Counter)  # facts of samples that are there, by name
    settings: dict[str, Any] = field(default_factory=dict)  # what to tell the trainer
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values, counters in order of their names."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {name: dict(sorted(values[name].items())) for name in ("left_out", "lost")}

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield f"{self.read} samples, {self.rows} rows in {len(self.files)} files"
        for reason, count in sorted(self.left_out.items()):
            yield f"left out: {count} samples: {reason}"
        for fact, count in sorted(self.lost.items()):
            yield f"lost: {count} samples: {fact}"
        for name, value in self.settings.items():
            yield f"tell the trainer: {name}: {value}"
        yield from self.notes


class Corpus:
    """A version of the corpus, read one row group at a time."""

    def __init__(self, training: Path) -> None:
        """Raises UserError when there is no corpus at `training`."""
        self.directory = training.resolve()  # a merge meanwhile doesn't change what is being read
        self.manifest = manifest.read_manifest(training)

    def tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the row groups in order."""
        for part in self.manifest.parts:
            with records.open_parquet(self.directory / part.file) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group, columns=columns)

    def samples(self) -> Iterator[Sample]:
        """Yield all samples in order."""
        for table in self.tables():
            for batch in table.to_batches(max_chunksize=64):
                for row in batch.to_pylist():
                    yield records.from_dict(Sample, row)


def unrenderable(sample: Sample) -> str | None:
    """Why no text stands for a sample: a template would end it with what the target never said. None if some does."""
    if not sample.messages:
        return "ready tokens without messages"
    if 1 not in sample.loss_mask:
        return "no supervised token"
    if "truncated" in sample.flags:
        return "truncated answer: rendered, it would end with a stop token"
    if "reasoning_only" in sample.flags:
        return "unfinished thought: rendered, it would be closed"
    return None


class JsonLines:
    """Writes rows as JSON Lines, a new file whenever one has grown to FILE_BYTES."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder = folder
        (folder / "data").mkdir()
        self._report = report
        self._file: BinaryIO | None = None
        self._size = 0

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *raised: object) -> None:
        self._close()
        durable.fsync_directory(self._folder / "data")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        if self._file is None or self._size + len(line) > FILE_BYTES:
            self._close()
            name = f"data/{len(self._report.files):05d}.jsonl"
            self._file = open(self._folder / name, "wb")  # noqa: SIM115 - closed by _close
            self._report.files.append(name)
            self._size = 0
        self._file.write(line)
        self._size += len(line)
        self._report.rows += 1

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            durable.fsync_file(self._folder / self._report.files[-1])
            self._file = None
