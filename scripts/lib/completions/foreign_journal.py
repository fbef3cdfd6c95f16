"""The journal of another shard, read while nobody or its own job writes it."""

import os
from collections.abc import Iterator, Set
from pathlib import Path

import orjson

from scripts.lib.completions.answers import Partial
from scripts.lib.completions.journal import Line, decode, read_at, scan
from scripts.lib.completions.journal_records import Done, FirstTurn, Header, Proven, TurnDone, TurnPart, Void
from scripts.lib.core.records import Completion, Turn, from_dict
from scripts.lib.prompts.shard import ids_digest


class ForeignJournal:
    """Its answers by id, as they are now: what is voided or torn isn't there, what is appended later isn't seen."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, -1
        self.identity: dict | None = None  # that its answers were made with
        self.rows: dict[str, int] = {}  # where the answers lie
        self.done: dict[str, Done] = {}
        self.partial: dict[str, Partial] = {}
        self._proven: dict[str, int] = {}  # by endpoint, before which position a canary vouches for its answers
        # Open until the last answer is read: its job may replace the file meanwhile.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for line in scan(os.dup(self._file)):
            self._take(line)

    def _take(self, line: Line) -> None:
        match line.record:
            case Header():
                self.identity = orjson.loads(line.body)
            case Done(prompt_id=prompt_id) as done:
                self.rows[prompt_id], self.done[prompt_id] = line.begin, done
                self.partial.pop(prompt_id, None)
            case TurnDone(prompt_id=prompt_id):
                partial = self.partial.setdefault(prompt_id, Partial())
                partial.turns.append(Turn(**orjson.loads(line.body)))
                partial.part = None
            case TurnPart(prompt_id=prompt_id):
                self.partial.setdefault(prompt_id, Partial()).part = Turn(**orjson.loads(line.body))
            case Void(prompt_id=prompt_id):
                for places in (self.rows, self.done, self.partial):
                    places.pop(prompt_id, None)
            case Proven(endpoint, position):
                self._proven[endpoint] = max(position, self._proven.get(endpoint, 0))

    def read(self, row: int) -> Completion:
        """The completion in the record that begins at `row`, without texts and messages."""
        return from_dict(Completion, orjson.loads(read_at(self._file, row, self.path)))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def first_turns(self, wanted: Set[str]) -> Iterator[FirstTurn]:
        """Of the answers to some prompts."""
        for prompt_id in sorted(self.rows.keys() & wanted):
            if turns := self.read(self.rows[prompt_id]).turns:
                first = turns[0]
                yield FirstTurn(prompt_id, ids_digest(first.prompt_ids), ids_digest(first.output_ids, first.seed))

    def doubtful_endpoint(self, prompt_id: str) -> str:
        """Who gave an answer that no canary has vouched for; empty when it is proven."""
        endpoint = self.done[prompt_id].endpoint
        return endpoint if self.rows[prompt_id] >= self._proven.get(endpoint, 0) else ""


def made_from(path: Path) -> str:
    """What the prompts were made from whose answers a journal holds; empty when it doesn't say, or is broken."""
    with open(path, "rb") as file:
        record = decode(file.readline())
    return record[0].made_from if record and isinstance(record[0], Header) else ""
