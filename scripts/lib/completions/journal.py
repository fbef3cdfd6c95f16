"""The journal: an append-only file that remembers every answer from the moment that it arrives.

One record per line: `crc32 TAB record TAB body`, both being JSON. The record (`journal_records`) is a
short list, so that a resume reads what a line is without parsing its thousands of ids. Lines
are written at once (they survive a kill -9 in the page cache) and fsynced in groups by the caller, at
least every second (a power cut costs at most that). What a crash tore at the end is cut off before
the first append. One process writes: a lock beside the file, which works on NFS.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from scripts.lib.completions.journal_records import Header, Record, from_list, to_list
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.locks import PATIENCE, hold

# Space that is given up when the disk is full, so that what has already arrived can still be written.
_RESERVE_BYTES = 8 << 20
_RESERVE_SHARE = 0.25  # at most this part of what is free
_LEAST_FREE = 4 << 20  # bytes of a disk that a job begins on
_PIECE = 1 << 14  # bytes that are read at once, more than most records have


class Line(NamedTuple):
    """A line of a journal: bytes `begin` to `end` of the file. `record` is None where it is damaged."""

    begin: int
    end: int
    record: Record | None
    body: bytes  # JSON


def encode(record: Record, body: Any) -> bytes:
    """One line of the journal."""
    line = b"%b\t%b" % (orjson.dumps(to_list(record)), orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
    return b"%08x\t%b\n" % (zlib.crc32(line), line)


def decode(line: bytes) -> tuple[Record, bytes] | None:
    """(record, JSON of its body) of a line, or None when it is torn or damaged."""
    if len(line) < 12 or line[8:9] != b"\t" or line[-1:] != b"\n":
        return None
    content = line[9:-1]
    try:
        if int(line[:8], 16) != zlib.crc32(content):
            return None
        head, _, body = content.partition(b"\t")
        return from_list(orjson.loads(head)), body
    except (ValueError, LookupError, TypeError):
        return None


def scan(path: Path | int, begin: int = 0) -> Iterator[Line]:
    """Yield the lines of a journal from byte `begin` on. A descriptor is closed in the end."""
    with open(path, "rb") as file:
        file.seek(begin)
        for line in file:
            end = begin + len(line)
            record, body = decode(line) or (None, line)
            yield Line(begin, end, record, body)
            begin = end


def read_at(file: int, offset: int, path: Path) -> bytes:
    """JSON of the body of the record at `offset` of an open journal."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.pread(file, _PIECE, offset + len(line))):
        line += piece[: piece.find(b"\n") + 1] or piece
    record = decode(line)
    if record is None:
        raise UserError(f"{path}: the record at byte {offset} was changed while the job ran")
    return record[1]


class Journal:
    """The one writer of a journal. Open it, read it with `scan`, then append."""

    def __init__(self, path: Path, identity: dict, what: str, patience: float = PATIENCE, made_from: str = "") -> None:
        """Lock and open the journal, cut its torn tail, and write the header when it is new.

        `identity` are the settings that the answers depend on, `made_from` tells the prompts apart from those that the
        dataset had when they were made otherwise; `what` names the journal for people.
        Raises UserError when another process writes it, or when its records are of another identity
        (use `recorded` to compare before).
        """
        self.path, self.what = path, what
        self.problem: UserError | None = None
        self.damaged = 0  # lines in the middle that can't be read; their prompts are asked again
        self.identity, self._header = identity, Header(made_from)
        self.recorded: dict | None = None  # identity in the file, None when it is new
        self._pending: list[bytes] = []
        self._dirty = False
        self._no_room = ""  # why something could not be written
        self._reserve = path.with_name(f".{path.name}.reserve")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = hold(path.with_name(f"{path.name}.lock"), wait=patience, what=what)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            self._lock.close()
            raise
        self._begin = self._end = 0  # of the records, and of what is written

    def recover(self, take: Callable[[int, Record, bytes], None]) -> None:
        """Hand every good record to `take(offset, record, body)`, then cut off what a crash tore."""
        damaged = 0
        for begin, end, record, body in scan(self.path):
            if record is None:
                damaged += 1
                continue
            if isinstance(record, Header):
                self.recorded, self._begin = orjson.loads(body), end
            else:
                take(begin, record, body)
            # Lines after this one that are all damaged are the torn tail, not damage.
            self.damaged += damaged
            damaged = 0
            self._end = end
        if os.fstat(self._file).st_size > self._end:
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)

    def begin(self) -> None:
        """Make the journal ready for appending: header when it is new, reserve of disk space."""
        if self.recorded is None:
            if self._end:
                raise UserError(
                    f"{self.path}: its first line is damaged: move the file away; its prompts are asked again"
                )
            self._append_now(encode(self._header, self.identity))
            self.recorded, self._begin = self.identity, self._end
            self.sync()
            durable.fsync_directory(self.path.parent)
        self._make_reserve()

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it but the header."""
        return self._end <= self._begin

    @property
    def position(self) -> int:
        """Where the next record will begin."""
        return self._end + sum(map(len, self._pending))

    def append(self, record: Record, body: Any) -> None:
        """Add a record: written now, before anybody sends the next request, and fsynced by the next `sync`."""
        self._pending.append(encode(record, body))
        self.write()

    def write(self) -> None:
        """Write what was appended and is not written yet. On a full disk give up the reserve for it and set `problem`."""
        if not self._pending:
            return
        try:
            self._write_pending()
        except OSError as error:
            self._no_room = error.strerror or str(error)
            self._reserve.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._write_pending()
        if self._no_room:
            lost = len(self._pending)
            kept = f"{lost} answers that had arrived could not be kept, and are asked again"
            self.problem = UserError(
                f"{self.path}: can't be written ({self._no_room}): the job stops; "
                f"{kept if lost else 'what has arrived is kept'}. Free some space and run again"
            )

    def _write_pending(self) -> None:
        """One record after the other, so that those which fit are kept. Raises OSError."""
        while self._pending:
            try:
                self._append_now(self._pending[0])
            except OSError:
                # Half a record may be there: away with it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)
                raise
            del self._pending[0]

    def sync(self) -> None:
        """Make everything written so far durable. May be called from another thread."""
        if not self._dirty:
            return
        self._dirty = False
        try:
            os.fsync(self._file)
        except OSError as error:
            self._dirty = True
            self.problem = UserError(
                f"{self.path}: fsync failed ({error.strerror}): the disk is full or broken; the job stops"
            )

    def read(self, offset: int) -> bytes:
        """JSON of the body of the record at `offset`."""
        return read_at(self._file, offset, self.path)

    def replace(self, lines: list[bytes]) -> None:
        """Start a new file with these lines in one step, after the old records were made durable elsewhere."""
        # What is kept may be of prompts that others have now: then it doesn't say that it is not.
        header = encode(Header() if lines else self._header, self.identity)
        data = b"".join([header, *lines])
        durable.write_bytes(self.path, data)
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._begin, self._end, self._dirty = len(header), len(data), False

    def close(self) -> None:
        """Write and sync what is left, and let the lock go."""
        if self._lock.descriptor < 0:
            return
        try:
            self.write()
            self.sync()
        finally:
            self._reserve.unlink(missing_ok=True)
            os.close(self._file)
            self._lock.close()

    def _append_now(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._end += len(data)
        self._dirty = True

    def _make_reserve(self) -> None:
        statistics = os.statvfs(self.path.parent)
        free = statistics.f_bavail * statistics.f_frsize
        if free < _LEAST_FREE:
            raise UserError(
                f"{self.path.parent}: {free / 1e6:.1f} MB of the disk are free, too little for the answers in flight: free "
                "some space and run again, nothing is lost"
            )
        size = min(_RESERVE_BYTES, int(free * _RESERVE_SHARE))
        descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise UserError(f"{self._reserve}: no space ({error.strerror}): free some and run again") from None
        finally:
            os.close(descriptor)
