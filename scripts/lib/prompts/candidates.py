"""Candidates of one dataset on disk, so that choosing among millions of prompts needs no memory.

A temporary SQLite file beside the output, without journal: it is removed afterwards, and a run that dies starts anew.
"""

import contextlib
import sqlite3
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.prompts.sources.formats import Conversation

_BATCH = 1000


@dataclass(slots=True)
class Candidate:
    """A clean prompt that may be chosen. `id` counts equal rows not yet."""

    number: int
    id: str
    key: bytes
    source: str
    conversation: Conversation


class Candidates:
    """Candidates, to which of them each key belongs, and the choice. `database` has room for what else must not sit in memory."""

    def __init__(self, path: Path):
        self.database = sqlite3.connect(path, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode=OFF",
            "PRAGMA synchronous=OFF",
            "PRAGMA cache_size=-65536",
            "CREATE TABLE candidate (ord BLOB, id TEXT, key BLOB, source TEXT, data BLOB)",
            "CREATE TABLE owner (key BLOB PRIMARY KEY, candidate INTEGER) WITHOUT ROWID",
            "CREATE TABLE kept (shard INTEGER, place INTEGER, candidate INTEGER, id TEXT, tokens INTEGER, ids BLOB)",
            "BEGIN",
        ):
            self.database.execute(statement)
        self._pending: list[tuple] = []
        self._pack = zstandard.ZstdCompressor(level=1).compress
        self._unpack = zstandard.ZstdDecompressor().decompress

    def add(self, order: bytes, own_id: str, key: bytes, source: str, conversation: Conversation) -> None:
        self._pending.append((order, own_id, key, source, self._pack(orjson.dumps(conversation))))
        if len(self._pending) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        self.database.executemany("INSERT INTO candidate VALUES (?, ?, ?, ?, ?)", self._pending)
        self._pending.clear()

    def in_order(self) -> Iterator[Candidate]:
        """All candidates by their seeded order; equal ones as they were read."""
        self._flush()
        self.database.execute("CREATE INDEX by_order ON candidate (ord)")
        rows = self.database.execute("SELECT rowid, id, key, source, data FROM candidate ORDER BY ord, rowid")
        for number, own_id, key, source, data in rows:
            yield Candidate(number, own_id, key, source, self._conversation(data))

    def not_reached(self, reached: int, examples: int) -> tuple[int, list[tuple[str, str]]]:
        """(how many candidates come after the first `reached`, (source, id) of the first of them)."""
        (total,) = self.database.execute("SELECT count(*) FROM candidate").fetchone()
        rows = self.database.execute(
            "SELECT source, id FROM candidate ORDER BY ord, rowid LIMIT ? OFFSET ?", (examples, reached)
        )
        return total - reached, rows.fetchall()

    def take_earlier(self, keys: list[bytes]) -> None:
        """Mark keys as used by a dataset that has priority."""
        self.database.executemany("INSERT OR IGNORE INTO owner VALUES (?, 0)", [(key,) for key in keys])

    def find_duplicates(self) -> None:
        """Give every other key to the first candidate that was read with it. Call before `duplicate`.

        The first, not the first in seeded order: a row that is added to a source must not take the place of one that
        has been answered.
        """
        self._flush()
        self.database.execute("INSERT OR IGNORE INTO owner SELECT key, min(rowid) FROM candidate GROUP BY key")

    def duplicate(self, candidate: Candidate) -> str | None:
        """Why the candidate's key is not its own; None when it is."""
        (owner,) = self.database.execute("SELECT candidate FROM owner WHERE key = ?", (candidate.key,)).fetchone()
        return None if owner == candidate.number else "duplicate" if owner else "duplicate_across"

    def keep(self, shard: int, place: int, candidate: int, own_id: str, tokens: int, ids: list[int] | None) -> None:
        """Choose a candidate for a shard; `place` orders the rows inside, `ids` are its prompt's, of `tokens`."""
        blob = None if ids is None else array("i", ids).tobytes()
        self.database.execute(
            "INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?)", (shard, place, candidate, own_id, tokens, blob)
        )

    def shard(self, shard: int) -> Iterator[tuple[str, int, list[int] | None, Candidate]]:
        """(id, prompt tokens, prompt ids, candidate) of a shard's choice, in place."""
        rows = self.database.execute(
            "SELECT kept.id, tokens, ids, candidate, key, source, data FROM kept JOIN candidate ON candidate.rowid = candidate"
            " WHERE shard = ? ORDER BY place",
            (shard,),
        )
        for own_id, tokens, blob, number, key, source, data in rows:
            ids = None if blob is None else array("i", blob).tolist()
            yield own_id, tokens, ids, Candidate(number, own_id, key, source, self._conversation(data))

    def index_choice(self) -> None:
        """Call once after the last `keep`, before `shard`."""
        self.database.execute("CREATE INDEX by_shard ON kept (shard, place)")

    def keys(self) -> Iterator[tuple[str, bytes]]:
        """(id, key) of the choice, shard by shard."""
        return iter(
            self.database.execute(
                "SELECT kept.id, key FROM kept JOIN candidate ON candidate.rowid = candidate ORDER BY shard, place"
            )
        )

    def _conversation(self, data: bytes) -> Conversation:
        value: dict[str, Any] = orjson.loads(self._unpack(data))
        value["messages"] = [Message(**message) for message in value["messages"]]
        return Conversation(**value)

    def close(self) -> None:
        self.database.close()


@contextlib.contextmanager
def candidates_in(folder: Path) -> Iterator[Candidates]:
    """Candidates on disk in `folder`, removed at the end. One at a time. Raises UserError when the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".candidates.sqlite"
    path.unlink(missing_ok=True)  # of a run that was killed
    opened = Candidates(path)
    try:
        yield opened
    except sqlite3.OperationalError as error:
        raise UserError(f"{path}: {error}: free some space and run again") from None
    finally:
        opened.close()
        path.unlink(missing_ok=True)
