"""Files that are not what their names say: pointers to a file, error pages, archives, other encodings.

Read as lines they would be a few broken rows, far below `cleaning.max_reject_rate`, or worse a few prompts, while all
rows of the file that should be there are missing (a ShareGPT that is a Git LFS pointer: Medusa issue 12).
"""

import re

from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.prompts.sources.compression import is_compressed

HEAD_BYTES = 1024
_TAR = 257  # where a tar archive says that it is one

# Beginning -> what it is, and what to do.
_POINTERS = {
    rb"version https://(git-lfs\.github\.com|hawser\.github\.com)/spec/": "is a Git LFS pointer, not the file: run `git lfs pull`",
    rb"(\.\./)*(\.git)?/annex/objects/|(\.\./)*\.git/annex/": "is a git-annex pointer, not the file: run `git annex get`",
}
_MARKUP = {
    rb"<!doctype html|<html|<head\b|<body\b": "is a web page (an error, or a login page): fetch the file again",
    rb"<\?xml|<error>": "is XML, as stores answer with errors: fetch the file again",
}
_ENCODINGS = {
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "is UTF-32 text: convert it with `iconv -f UTF-32 -t UTF-8`",
    rb"\xff\xfe|\xfe\xff|([^\0]\0){8}|(\0[^\0]){8}": "is UTF-16 text: convert it with `iconv -f UTF-16 -t UTF-8`",
}
_BINARY = {
    rb"PK\x03\x04|PK\x05\x06": "is a zip archive (or an Excel file): unpack it, or save it as CSV",
    rb"7z\xbc\xaf\x27\x1c": "is a 7z archive: unpack it",
    rb"Rar!": "is a rar archive: unpack it",
    rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18": "is compressed with lz4: unpack it (gzip, zstd, bzip2 and xz are read)",
    rb"\xff\x06\0\0sNaPpY": "is compressed with snappy: unpack it (gzip, zstd, bzip2 and xz are read)",
    rb"\x1f[\x9d\xa0]": "is compressed with compress: unpack it (gzip, zstd, bzip2 and xz are read)",
    rb"\x5d\0\0": "is compressed with lzma: unpack it (gzip, zstd, bzip2 and xz are read)",
    rb"LZIP|\x89LZO": "is compressed with lzip or lzop: unpack it (gzip, zstd, bzip2 and xz are read)",
    rb"[\x22-\x27]\xb5\x2f\xfd": "is compressed with zstd before version 0.8: unpack it and compress it again",
    rb"PAR1": "is a Parquet file: name it .parquet",
    rb"ARROW1|\xff\xff\xff\xff": "is an Arrow file: name it .arrow",
    rb"Obj\x01": "is an Avro file: convert it to Parquet or JSON Lines",
    rb"ORC": "is an ORC file: convert it to Parquet or JSON Lines",
    rb"SQLite format 3\0": "is an SQLite database: export its table to CSV or JSON Lines",
    rb"\x89HDF": "is an HDF5 file: convert it to Parquet or JSON Lines",
    rb"%PDF": "is a PDF",
    rb"\x80[\x02-\x05]": "is a Python pickle: convert it to Parquet or JSON Lines",
}
_OWN = {"parquet": b"PAR1", "arrow": b"ARROW1"}
_CONTROL = bytes({*range(9), 11, *range(14, 27), *range(28, 32), 127})


def disguise(head: bytes, kind: str) -> str | None:
    """What a file of `kind` is in truth, and what to do, by its first bytes; None when nothing speaks against its name.

    Call it for `parquet` and `arrow` only when they can't be read as such.
    """
    return _first(_POINTERS, head) or (_of_columns(head, kind) if kind in _OWN else _of_text(head, kind))


def _of_text(head: bytes, kind: str) -> str | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:HEAD_BYTES]
    # A prompt may begin with a tag, hardly with a document's first line.
    if (markup := _first(_MARKUP, start)) and (kind != "text" or start[:9].lower() == b"<!doctype"):
        return markup
    if encoding := _first(_ENCODINGS, head):
        return encoding
    if kind == "text" and _is_json_line(head):
        return "holds JSON Lines: name it .jsonl"
    start = head[:HEAD_BYTES]
    printable = len(start.translate(None, _CONTROL))
    if printable == len(start):
        return None  # text that begins with `PAR1` or `ORC`
    if start[_TAR : _TAR + 5] == b"ustar":
        return "is a tar archive: unpack it"
    return _first(_BINARY, start) or ("is binary, no text of any kind" if printable < 0.9 * len(start) else None)


def _is_json_line(head: bytes) -> bool:
    first, newline, _ = head.partition(b"\n")
    try:
        return bool(newline) and first.startswith(b"{") and isinstance(parse_json(first), dict)
    except NotJson:
        return False


def _of_columns(head: bytes, kind: str) -> str | None:
    if head.startswith(_OWN[kind]):
        return None
    if is_compressed(head):
        return "is compressed as a whole: unpack it"
    if head.lstrip()[:1] in (b"{", b"["):
        return "is JSON: name it .jsonl or .json"
    return _first(_MARKUP | _BINARY | _ENCODINGS, head.lstrip())


def _first(table: dict[bytes, str], head: bytes) -> str | None:
    return next((told for pattern, told in table.items() if re.match(pattern, head, re.IGNORECASE)), None)
