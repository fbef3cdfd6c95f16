"""What a shard has answered already, in its journal and its finished file, and what arrives.

`state/journals/{dataset}/{shard}.journal` holds what has arrived since the shard was last finished;
`state/completions/{dataset}/{shard}.parquet` the finished shard, of which the declared output is a
hard link; `{shard}.unused.parquet` answers to prompts that are no longer in the shard, kept because
they cost money. A resume reads all three by id.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import orjson

from scripts.lib.completions.budget import Amount
from scripts.lib.completions.finished_file import FinishedFile, Totals
from scripts.lib.completions.journal import Journal, scan
from scripts.lib.completions.journal_records import Done, Ended, Proven, Record, TurnDone, TurnPart, Void, billed
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import State
from scripts.lib.core.provenance import differences
from scripts.lib.core.records import OUTCOMES, Completion, Turn, from_dict, read_provenance
from scripts.lib.prompts.shard import prompt_ids


@dataclass
class Partial:
    """Where an unfinished prompt stands: its answered turns, and a truncated answer to be continued."""

    turns: list[Turn] = field(default_factory=list)
    part: Turn | None = None


class Borrowed(NamedTuple):
    """An answer in a finished file of another shard, or to another prompt of the same words."""

    file: FinishedFile
    row: int
    ended: Ended

    def completion(self, prompt_id: str, dataset: str) -> Completion:
        return replace(self.file.read(self.row), id=prompt_id, dataset=dataset, taken_from=str(self.file.path))


class ShardAnswers:
    """All answers of one shard. The only writer of its journal while it lives."""

    def __init__(
        self,
        state: Path,
        dataset: str,
        shard: str,
        identity: dict,
        add_text: Callable[[Turn], None],
        made_from: str = "",
    ) -> None:
        """Open the journal and the finished file; raises UserError when they are of other settings.

        The journal holds what can't be had twice: ids, not the text that they say nor the prompt's messages.
        `add_text` gives a turn its text for the finished file; `made_from` is `prompts.shard.made_from` of the prompts.
        """
        self.dataset, self.identity, self._add_text = dataset, identity, add_text
        paths = State(state)
        self.finished_path, self.unused_path = paths.finished(dataset, shard), paths.unused(dataset, shard)
        self.journal = Journal(paths.journal(dataset, shard), identity, f"shard {dataset}/{shard}", made_from=made_from)
        try:
            for path in (self.finished_path, self.unused_path):
                durable.remove_remains(path)
            self.finished, self.unused = FinishedFile(self.finished_path), FinishedFile(self.unused_path)
            self.partial: dict[str, Partial] = {}
            self.totals = Totals()
            self.arrived: dict[str, int] = {}  # where in the journal the outcomes lie
            self.elsewhere: dict[str, Borrowed] = {}  # answers that lie in other files of the run
            self._unproven: dict[str, array] = {}  # by endpoint, where its answers since its last good canary lie
            self.journal.recover(self._take)
            self.totals.merge(self.finished.totals)
            self._check()
            if self.journal.recorded is not None and self.journal.empty:
                self.journal.replace([])  # its header may be of other settings or prompts
            self.journal.begin()
        except BaseException:
            self.journal.close()
            raise

    def _take(self, offset: int, record: Record, body: bytes) -> None:
        """Take in one record of the journal."""
        match record:
            case Done():
                self._note_endpoint(record.endpoint, offset)
                self.arrived[record.prompt_id] = offset
                self.partial.pop(record.prompt_id, None)
                if record.prompt_id not in self.finished.rows:  # a killed job that was finishing leaves them in both
                    self.totals.add(record.ended, record.taken_from)
            case TurnDone():
                self._note_endpoint(record.endpoint, offset)
                partial = self.partial.setdefault(record.prompt_id, Partial())
                partial.turns.append(Turn(**orjson.loads(body)))
                partial.part = None
            case TurnPart():
                self._note_endpoint(record.endpoint, offset)
                self.partial.setdefault(record.prompt_id, Partial()).part = Turn(**orjson.loads(body))
            case Void():
                self.arrived.pop(record.prompt_id, None)
                self.finished.rows.pop(record.prompt_id, None)
                self.partial.pop(record.prompt_id, None)
                if record.ended is not None:
                    self.totals.subtract(record.ended, record.taken_from)
            case Proven():
                offsets = self._unproven.pop(record.endpoint, array("q"))
                self._unproven[record.endpoint] = array("q", [at for at in offsets if at >= record.position])

    def _note_endpoint(self, endpoint: str, offset: int) -> None:
        if endpoint:  # journals of before name none
            self._unproven.setdefault(endpoint, array("q")).append(offset)

    def index_journal(self) -> None:
        """Read the journal again: while a job runs, nobody needs to know where its answers lie."""
        self.arrived, self.partial, self.totals, self._unproven = {}, {}, Totals(), {}
        for line in scan(self.journal.path):
            if line.record is not None:
                self._take(line.begin, line.record, line.body)

    def _check(self) -> None:
        """Refuse answers that were made with other settings, naming each setting."""
        recorded = None if self.journal.empty else self.journal.recorded
        if recorded is None and self.finished_path.exists():
            recorded = read_provenance(self.finished_path).get("identity")
        if recorded is None or recorded == self.identity:
            return
        changed = "; ".join(differences(recorded, self.identity))
        folders = f"{self.journal.path.parent} and {self.finished_path.parent}"
        raise UserError(
            f"{self.journal.what} was answered with other settings ({changed}): put them back, or move {folders} away "
            "to have the dataset answered anew"
        )

    def count(self, prompts: Path) -> tuple[int, int, Totals]:
        """(prompts of a shard, how many of them are answered, sums over these)."""
        total = answered = 0
        for prompt_id in prompt_ids(prompts):
            total += 1
            answered += prompt_id in self
        if not self.unused.rows and not self.elsewhere and answered == self.totals.outcomes.total():
            return total, answered, self.totals
        # Prompts have left the shard since, or have come back.
        return total, answered, self._sums(set(prompt_ids(prompts)))

    def _sums(self, wanted: set[str]) -> Totals:
        """Sums over the answers to some prompts, wherever they lie."""
        sums, left = Totals(), set(wanted)
        for line in scan(self.journal.path):
            done = line.record
            if isinstance(done, Done) and done.prompt_id in left and self.arrived.get(done.prompt_id) == line.begin:
                left.discard(done.prompt_id)
                sums.add(done.ended, done.taken_from)
        for file in (self.finished, self.unused):
            for prompt_id, ended in file.ended():
                if prompt_id in left:
                    left.discard(prompt_id)
                    sums.add(ended)
        for prompt_id in left & self.elsewhere.keys():
            sums.add(self.elsewhere[prompt_id].ended, "elsewhere")
        return sums

    def __contains__(self, prompt_id: str) -> bool:
        return (
            prompt_id in self.arrived
            or prompt_id in self.finished.rows
            or prompt_id in self.unused.rows
            or prompt_id in self.elsewhere
        )

    def get(self, prompt_id: str) -> Completion | None:
        """The completion of a prompt, from wherever it lies."""
        offset = self.arrived.get(prompt_id)
        if offset is not None:
            return self.read_journal(offset)
        for file in (self.finished, self.unused):
            row = file.rows.get(prompt_id)
            if row is not None:
                return file.read(row)
        borrowed = self.elsewhere.get(prompt_id)
        return borrowed.completion(prompt_id, self.dataset) if borrowed else None

    def read_journal(self, offset: int) -> Completion:
        """The completion in the record at `offset`, with its texts."""
        completion = from_dict(Completion, orjson.loads(self.journal.read(offset)))
        for turn in completion.turns:
            self._add_text(turn)
        return completion

    def done(self, completion: Completion, endpoint: str = "") -> Ended:
        """Journal a terminal outcome; `endpoint` gave the answer or refusal that led to it, if one did."""
        ended = Ended.of(completion.outcome, completion.turns)
        self.journal.append(_done(completion, ended, endpoint), completion)
        return ended

    def take_over(self, completion: Completion, endpoint: str) -> None:
        """Journal an outcome that another shard's journal holds; `endpoint` gave it and isn't proven."""
        offset = self.journal.position
        self.totals.add(self.done(completion, endpoint), completion.taken_from)
        self.arrived[completion.id] = offset
        self._note_endpoint(endpoint, offset)

    def take_over_begun(self, prompt_id: str, partial: Partial) -> None:
        """Journal the turns of a conversation that was begun elsewhere."""
        for turn in partial.turns:
            self._note_endpoint(turn.endpoint, self.journal.position)
            self.turn(prompt_id, turn)
        if partial.part:
            self._note_endpoint(partial.part.endpoint, self.journal.position)
            self.part(prompt_id, partial.part)
        self.partial[prompt_id] = partial

    def turn(self, prompt_id: str, turn: Turn) -> None:
        """Journal an answered turn of a conversation that goes on."""
        self.journal.append(TurnDone(prompt_id, turn.endpoint), turn)

    def part(self, prompt_id: str, turn: Turn) -> None:
        """Journal a truncated answer that is to be continued or asked again with more room."""
        self.journal.append(TurnPart(prompt_id, turn.endpoint), turn)

    def prove(self, endpoint: str, position: int) -> None:
        """Journal that a canary proved what `endpoint` answered before `position`, as far as it was not voided."""
        self.journal.append(Proven(endpoint, position), None)

    @property
    def paid(self) -> Amount:
        """What this shard has paid for the answers that it holds, begun conversations included."""
        turns = [turn for one in self.partial.values() for turn in (*one.turns, *([one.part] if one.part else []))]
        return self.totals.paid + Amount(sum(map(billed, turns)), sum(turn.cost_usd for turn in turns))

    def unproven(self) -> dict[str, tuple[int, int]]:
        """(answers, position of the first) by endpoint of what earlier jobs left unproven."""
        return {endpoint: (len(offsets), offsets[0]) for endpoint, offsets in self._unproven.items() if offsets}

    def void(self, endpoint: str, since: int) -> tuple[dict[str, Done], set[str]]:
        """Journal that the answers of `endpoint` from position `since` on are not to be trusted.

        Returns, of the prompts that got one, the outcomes by id of those that had theirs, and the ids of the others.
        """
        voided = self._void(since, lambda record: record.endpoint == endpoint)
        self.prove(endpoint, self.journal.position)  # nothing of it is left to be proven
        return voided

    def void_refusals(self, endpoint: str, since: int) -> tuple[dict[str, Done], set[str]]:
        """As `void`, of what `endpoint` refused only."""
        return self._void(
            since,
            lambda record: (
                isinstance(record, Done) and record.endpoint == endpoint and OUTCOMES[record.outcome].refused
            ),
        )

    def _void(
        self, since: int, doubtful: Callable[[Done | TurnDone | TurnPart], bool]
    ) -> tuple[dict[str, Done], set[str]]:
        self.journal.write()
        ended: dict[str, Done] = {}
        begun: set[str] = set()
        for line in scan(self.journal.path, since):
            record = line.record
            if isinstance(record, Void):
                begun.discard(record.prompt_id)
                ended.pop(record.prompt_id, None)
            elif isinstance(record, Done | TurnDone | TurnPart):
                if doubtful(record):
                    begun.add(record.prompt_id)
                if isinstance(record, Done) and record.prompt_id in begun:
                    ended[record.prompt_id] = record
        for prompt_id in sorted(begun):
            done = ended.get(prompt_id)
            self.journal.append(Void(prompt_id, *done.ended, done.taken_from) if done else Void(prompt_id), None)
        return ended, begun - ended.keys()

    def close(self) -> None:
        self.journal.close()


def _done(completion: Completion, ended: Ended, endpoint: str) -> Done:
    outcome, input_tokens, output_tokens, cost_usd, billed_tokens = ended
    return Done(
        completion.id, outcome, input_tokens, output_tokens, cost_usd, endpoint, billed_tokens, completion.taken_from
    )
