"""Rows of CSV and TSV files, whatever separates their cells."""

import csv
import io
import itertools
import re
import sys
from collections.abc import Iterator

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.row import CHUNK_BYTES, MAX_ROW_BYTES, Row

SEPARATORS = ",;\t|"
_SAMPLE_ROWS = 50
_DIRECTIVE = re.compile(r'"?sep=(.)"?\r?\n')  # Excel's own first line


def comma_separated(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """Rows of a .csv file: by commas, or by what its header and rows are separated by."""
    return _table(name, stream, ",")


def tab_separated(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """Rows of a .tsv file: by tabs, or by what its header and rows are separated by."""
    return _table(name, stream, "\t")


def separator(sample: str, usual: str) -> str:
    """What separates the cells of a table that begins with `sample`: the usual separator, unless another one fits better.

    One fits when it cuts the header, and most rows into as many cells.
    """
    fits = {one: _fit(sample, one) for one in usual + SEPARATORS}
    best = max(fits, key=lambda one: (fits[one], one == usual))
    return best if fits[best] > 0.5 else usual


def _fit(sample: str, separator: str) -> float:
    """The share of rows that have the header's number of cells; 0 where the header has one cell only."""
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=separator, strict=True)
    rows = []
    try:
        rows = [cells for cells in itertools.islice(reader, _SAMPLE_ROWS) if cells]
    except csv.Error:
        return 0.0
    if not rows or len(rows[0]) < 2:
        return 0.0
    return sum(len(cells) == len(rows[0]) for cells in rows) / len(rows)


def _whole_rows(head: bytes) -> str:
    """The text of a file's beginning without its last line, which may go on."""
    text = head.decode("utf-8-sig", "surrogateescape")
    return text if len(head) < CHUNK_BYTES else text[: text.rfind("\n") + 1]


def _table(name: str, stream: io.BufferedReader, usual: str) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, MAX_ROW_BYTES))
    sample = _whole_rows(stream.peek(CHUNK_BYTES))
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    directive = _DIRECTIVE.match(sample)
    if directive:
        text.readline()
    delimiter = directive[1] if directive else separator(sample, usual)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    before = 1 if directive else 0
    header: list[str] | None = None
    while True:
        where = f"{name}:{before + reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # The parser has lost the row's end: what follows could be read as anything.
            raise UserError(f"{where}: not readable as a table: {error}: the file is broken from here on") from None
        if not cells:
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if len(set(header)) != len(header):
                raise UserError(f"{where}: two columns have the same name: {', '.join(header)}")
        elif len(cells) != len(header):
            detail = f"{len(cells)} cells, {len(header)} columns"
            yield Row(where, None, Defect("broken_row", detail))
        else:
            yield Row(where, dict(zip(header, cells)))
