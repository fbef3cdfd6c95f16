"""Rows as JSON Lines, in files of limited size."""

from pathlib import Path
from typing import Any, BinaryIO

import orjson

from scripts.lib.core import durable
from scripts.lib.exports.report import Report

FILE_BYTES = 1 << 30  # of one JSON Lines file: SpecForge holds a whole file as Python lists


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
