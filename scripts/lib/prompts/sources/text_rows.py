"""Rows of text files: JSON Lines, JSON in its layouts, a prompt per line."""

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.row import CHUNK_BYTES, MAX_ROW_BYTES, Row

_BOM = b"\xef\xbb\xbf"
_TURN_KEYS = {"role", "from", "speaker"}


def json_lines(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """A value per line; the items of an array where the file is one in spite of its name."""
    start = _start(stream)
    array = start.startswith(b"[") and not _first_line_is_whole(start) and _is_row(_first_item(start))
    return (_values_of_file if array else _lines)(name, stream)


def json_values(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """The items of an array, one object, objects one after the other, or JSON Lines in spite of the name."""
    start = _start(stream)
    return (_lines if not start or _first_line_is_whole(start) else _values_of_file)(name, stream)


def texts(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """A prompt per line."""
    for number in itertools.count(1):
        line = stream.readline(MAX_ROW_BYTES)
        if not line:
            return
        if line.strip():
            text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            yield Row(f"{name}:{number}", {"text": text})


def _start(stream: io.BufferedReader) -> bytes:
    return stream.peek(CHUNK_BYTES).removeprefix(_BOM).lstrip()


def _first_line_is_whole(start: bytes) -> bool:
    """Whether a file's first line is a row, an object or a list, and others follow."""
    first, newline, rest = start.partition(b"\n")
    try:
        value = parse_json(first)
    except NotJson:
        return False
    return bool(newline) and (isinstance(value, dict) or (isinstance(value, list) and bool(rest.strip())))


def _first_item(start: bytes) -> Any:
    """The first item of the array that `start` begins; None when it can't be seen whole."""
    text = start[1:].decode("utf-8", "ignore").lstrip()
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None


def _is_row(item: Any) -> bool:
    """Whether an item of an array is a row: a list of turns is a row itself."""
    return isinstance(item, dict) and not _TURN_KEYS & item.keys()


def _lines(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    """Lines end at LF only: U+2028 and friends inside strings are text."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        where = f"{name}:{number}"
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Row(where, None, Defect("row_too_large", f"more than {MAX_ROW_BYTES >> 20} MiB"))
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.strip()
        if not line:
            continue
        try:
            yield Row(where, parse_json(line))
        except NotJson as error:
            yield Row(where, None, Defect("broken_json", str(error)))


def _values_of_file(name: str, stream: io.BufferedReader) -> Iterator[Row]:
    for number, value in enumerate(_values(name, io.TextIOWrapper(stream, "utf-8-sig")), 1):
        yield Row(f"{name}:{number}", value)


def _values(name: str, text: io.TextIOWrapper) -> Iterator[Any]:
    """Items of one or more JSON arrays, or values one after the other, decoded as they arrive."""
    decode = json.JSONDecoder().raw_decode
    buffer, position, ended, count = "", 0, False, 0
    arrays = inside = False  # whether the file consists of arrays, and one is open
    wanted = CHUNK_BYTES

    def fail(problem: str) -> UserError:
        return UserError(f"{name}:{count + 1}: {problem}: the file is broken from here on, mend it")

    while True:
        while position < len(buffer) and (buffer[position].isspace() or buffer[position] == ","):
            position += 1
        if position < len(buffer) and not inside and (arrays or count == 0) and buffer[position] == "[":
            arrays = inside = True
            position += 1
            continue
        if position < len(buffer) and inside and buffer[position] == "]":
            inside = False
            position += 1
            continue
        if position < len(buffer) and arrays and not inside:
            raise fail("something follows after the array")
        problem = ""
        if position < len(buffer):
            try:
                value, end = decode(buffer, position)
                # A number may go on in the next chunk; an object or a string ends with itself.
                if end < len(buffer) or ended or buffer[end - 1] in '}"]':
                    yield value
                    count += 1
                    position = end
                    wanted = CHUNK_BYTES
                    continue
            except json.JSONDecodeError as error:
                problem = f"not JSON ({error.msg})"
            except (ValueError, RecursionError):
                raise fail("nested too deeply, or a number without end") from None
        if ended:
            if position < len(buffer):
                raise fail(problem)
            if inside:
                raise fail("the array never closes")
            return
        if len(buffer) - position > MAX_ROW_BYTES:
            raise fail(problem or f"a row of more than {MAX_ROW_BYTES >> 20} MiB")
        try:
            chunk = text.read(wanted)
        except UnicodeDecodeError as error:
            raise fail(f"not UTF-8 ({error.reason})") from None
        ended = not chunk
        buffer, position = buffer[position:] + chunk, 0
        # A row that is longer than what was read is decoded again from its start: read twice as much each time.
        wanted = min(2 * wanted, MAX_ROW_BYTES)
