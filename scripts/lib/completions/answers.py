"""What a shard has answered already: the journal, the finished file, and the finished file's making.

`state/journals/{dataset}/{shard}.journal` holds what has arrived since the shard was last finished;
`state/completions/{dataset}/{shard}.parquet` the finished shard, of which the declared output is a
hard link; `{shard}.unused.parquet` answers to prompts that are no longer in the shard, kept because
they cost money. A resume reads all three by id.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from scripts.lib.completions.finished_file import FinishedFile, Totals
from scripts.lib.completions.id_index import IdIndex
from scripts.lib.completions.journal import HEADER, Journal, encode, scan
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import State
from scripts.lib.core.provenance import differences
from scripts.lib.core.records import (
    OUTCOMES,
    Completion,
    Message,
    Turn,
    from_dict,
    read_provenance,
    write_rows,
)
from scripts.lib.prompts.shard import prompt_ids, read_prompts

DONE, TURN, PART, VOID, PROVEN = "done", "turn", "part", "void", "proven"


@dataclass
class Partial:
    """Where an unfinished prompt stands: its answered turns, and a truncated answer to be continued."""

    turns: list[Turn] = field(default_factory=list)
    part: Turn | None = None


class ShardAnswers:
    """All answers of one shard. The only writer of its journal while it lives."""

    def __init__(
        self,
        state: Path,
        dataset: str,
        shard: str,
        identity: dict,
        add_text: Callable[[Turn], None],
    ) -> None:
        """Open the journal and the finished file; raises UserError when they are of other settings.

        The journal holds what can't be had twice: ids, not the text that they say nor the prompt's messages.
        `add_text` gives a turn its text for the finished file.
        """
        self.dataset, self.identity, self._add_text = dataset, identity, add_text
        paths = State(state)
        self.finished_path, self.unused_path = paths.finished(dataset, shard), paths.unused(dataset, shard)
        self.journal = Journal(paths.journal(dataset, shard), identity, f"shard {dataset}/{shard}")
        try:
            for path in (self.finished_path, self.unused_path):
                durable.remove_remains(path)
            self.finished, self.unused = FinishedFile(self.finished_path), FinishedFile(self.unused_path)
            self.partial: dict[str, Partial] = {}
            self.totals = Totals()
            self.arrived = IdIndex()
            self._unproven: dict[str, array] = {}  # by endpoint, where its answers since its last good canary lie
            self.journal.recover(self._take)
            self.totals.merge(self.finished.totals)
            self._check()
            if self.journal.recorded not in (None, identity):
                self.journal.replace([])  # nothing but a header of other settings
            self.journal.begin()
        except BaseException:
            self.journal.close()
            raise

    def _take(self, offset: int, head: list, body: bytes) -> None:
        """Take in one record of the journal."""
        kind, id = head[0], head[1]
        if kind == PROVEN:
            offsets = self._unproven.pop(head[1], array("q"))
            self._unproven[head[1]] = array("q", [at for at in offsets if at >= head[2]])
            return
        if kind == VOID:
            self.arrived.add(id, -1)
            self.finished.index.add(id, -1)
            self.partial.pop(id, None)
            if len(head) > 2:
                self.totals.subtract(*head[2:])
            return
        if isinstance(head[-1], str) and head[-1]:  # the endpoint; journals of before have none
            self._unproven.setdefault(head[-1], array("q")).append(offset)
        if kind == DONE:
            self.arrived.add(id, offset)
            self.partial.pop(id, None)
            if id not in self.finished.index:  # a job that was killed while it finished leaves them in both
                self.totals.add(*head[2:6])
        elif kind == TURN:
            partial = self.partial.setdefault(id, Partial())
            partial.turns.append(Turn(**orjson.loads(body)))
            partial.part = None
        elif kind == PART:
            self.partial.setdefault(id, Partial()).part = Turn(**orjson.loads(body))

    def _index_journal(self) -> None:
        """Read the journal again: while a job runs, nobody needs to know where its answers lie."""
        self.arrived, self.partial, self.totals, self._unproven = IdIndex(), {}, Totals(), {}
        for offset, head, body in scan(self.journal.path):
            if head is not None and head[0] != HEADER:
                self._take(offset, head, body)

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
        for id in prompt_ids(prompts):
            total += 1
            answered += id in self
        if not len(self.unused.index) and answered == self.totals.outcomes.total():
            return total, answered, self.totals
        # Prompts have left the shard since, or have come back.
        return total, answered, self._sums(set(prompt_ids(prompts)))

    def _sums(self, wanted: set[str]) -> Totals:
        """Sums over the answers to some prompts, wherever they lie."""
        sums, left = Totals(), set(wanted)
        for offset, head, _ in scan(self.journal.path):
            if head is not None and head[0] == DONE and head[1] in left and self.arrived.get(head[1]) == offset:
                left.discard(head[1])
                sums.add(*head[2:6])
        for file in (self.finished, self.unused):
            for id, *counts in file.counts():
                if id in left:
                    left.discard(id)
                    sums.add(*counts)
        return sums

    def __contains__(self, id: str) -> bool:
        return id in self.arrived or id in self.finished.index or id in self.unused.index

    def get(self, id: str) -> Completion | None:
        """The completion of a prompt, from wherever it lies."""
        offset = self.arrived.get(id)
        if offset is not None:
            return self._read_journal(offset)
        for file in (self.finished, self.unused):
            row = file.index.get(id)
            if row is not None:
                return file.read(row)
        return None

    def _read_journal(self, offset: int) -> Completion:
        completion = from_dict(Completion, orjson.loads(self.journal.read(offset)))
        for turn in completion.turns:
            self._add_text(turn)
        return completion

    def done(
        self, completion: Completion, input_tokens: int, output_tokens: int, cost_usd: float, endpoint: str = ""
    ) -> None:
        """Journal a terminal outcome; `endpoint` gave the answer or refusal that led to it, if one did."""
        head = [DONE, completion.id, completion.outcome, input_tokens, output_tokens, cost_usd, endpoint]
        self.journal.append(head, completion)

    def turn(self, id: str, turn: Turn) -> None:
        """Journal an answered turn of a conversation that goes on."""
        self.journal.append([TURN, id, turn.endpoint], turn)

    def part(self, id: str, turn: Turn) -> None:
        """Journal a truncated answer that is to be continued or asked again with more room."""
        self.journal.append([PART, id, turn.endpoint], turn)

    def prove(self, endpoint: str, position: int) -> None:
        """Journal that a canary proved what `endpoint` answered before `position`, as far as it was not voided."""
        self.journal.append([PROVEN, endpoint, position], None)

    def unproven(self) -> dict[str, tuple[int, int]]:
        """(answers, position of the first) by endpoint of what earlier jobs left unproven."""
        return {endpoint: (len(offsets), offsets[0]) for endpoint, offsets in self._unproven.items() if offsets}

    def void(self, endpoint: str, since: int) -> tuple[dict[str, tuple], set[str]]:
        """Journal that the answers of `endpoint` from position `since` on are not to be trusted.

        Returns, of the prompts that got one, (outcome, input tokens, output tokens, US dollars) by id of those that had
        their outcome, and the ids of the others.
        """
        voided = self._void(since, lambda head: head[-1] == endpoint)
        self.prove(endpoint, self.journal.position)  # nothing of it is left to be proven
        return voided

    def void_refusals(self, endpoint: str, since: int) -> tuple[dict[str, tuple], set[str]]:
        """As `void`, of what `endpoint` refused only."""
        return self._void(since, lambda head: head[-1] == endpoint and head[0] == DONE and OUTCOMES[head[2]].refused)

    def _void(self, since: int, doubtful: Callable[[list], bool]) -> tuple[dict[str, tuple], set[str]]:
        self.journal.write()
        counts: dict[str, tuple] = {}
        begun: set[str] = set()
        for _, head, _ in scan(self.journal.path, since):
            if head is None:
                continue
            kind, prompt = head[0], head[1]
            if kind == VOID:
                begun.discard(prompt)
                counts.pop(prompt, None)
                continue
            if doubtful(head):
                begun.add(prompt)
            if kind == DONE and prompt in begun:
                counts[prompt] = tuple(head[2:6])
        for prompt in sorted(begun):
            self.journal.append([VOID, prompt, *counts.get(prompt, ())], None)
        return counts, begun - counts.keys()

    def finish(
        self, prompts: Path, output: Path, unpaid: Callable[[str], str | None], provenance: dict
    ) -> Counter[str]:
        """Write the finished shard, one row per prompt in the prompts' order, and give it the declared name.

        `unpaid(id)` is the reason why a prompt is over budget, None when it is not. Returns the prompts
        by outcome. Order matters for crashes: first everything is durable in the finished file, then the
        journal is emptied, then the declared output appears.
        """
        self.journal.write()
        self.journal.sync()
        if self.journal.problem:
            raise self.journal.problem
        here, order = IdIndex(), hashlib.sha256()
        for position, id in enumerate(prompt_ids(prompts)):
            here.add(id, position)
            order.update(id.encode())
        if self.journal.empty and self.finished.order == order.hexdigest():
            outcomes = self.finished.totals.outcomes
        else:
            self._index_journal()
            self._keep_unused(here, provenance)
            self.unused = FinishedFile(self.unused_path)
            outcomes = self._write_finished(prompts, unpaid, provenance)
            self._empty_journal()
            if not self.unused.index.missing_in(here):
                self.unused_path.unlink(missing_ok=True)
        if outcomes.total() != len(here):
            raise UserError(
                f"{prompts}: {len(here)} different prompts, {outcomes.total()} outcomes: make the prompts again"
            )
        link(self.finished_path, output)
        return outcomes

    def _empty_journal(self) -> None:
        """Forget what is now in the finished file; keep the turns of conversations that ran out of budget."""
        kept = []
        for id, partial in self.partial.items():
            kept += [encode([TURN, id, turn.endpoint], turn) for turn in partial.turns]
            if partial.part is not None:
                kept.append(encode([PART, id, partial.part.endpoint], partial.part))
        self.journal.replace(kept)

    def _write_finished(self, prompts: Path, unpaid: Callable[[str], str | None], provenance: dict) -> Counter[str]:
        totals = Totals()

        def rows() -> Iterator[Completion]:
            for prompt in read_prompts(prompts, lambda id: True):
                completion = self.get(prompt.id)
                if completion is not None and completion.id != prompt.id:
                    raise UserError(
                        f"{prompts}: the answer to prompt {completion.id} was found in the place of {prompt.id}: its file "
                        "was changed meanwhile; nothing is written, run again"
                    )
                if completion is None:
                    reason = unpaid(prompt.id)
                    if reason is None:
                        raise UserError(f"{prompts}: {prompt.source}: prompt {prompt.id} has no outcome: run again")
                    completion = Completion(prompt.id, self.dataset, "over_budget", reason, attempts=0)
                completion.messages = conversation(prompt.messages, completion.turns)
                totals.add(completion.outcome, *token_counts(completion.turns))
                yield completion

        write_rows(
            self.finished_path,
            Completion,
            rows(),
            lambda: {**provenance, "identity": self.identity, "totals": totals.plain()},
        )
        return totals.outcomes

    def _keep_unused(self, here: IdIndex, provenance: dict) -> None:
        """Before the finished file is replaced: keep its answers to prompts that are not in the shard any more.

        Answers whose prompts came back stay in the file of unused ones as well, until all of them did.
        """
        sources = [
            (self.arrived, self._read_journal),
            (self.finished.index, self.finished.read),
        ]
        if not any(index.missing_in(here) for index, _ in sources):
            return
        seen: set[str] = set()

        def rows() -> Iterator[Completion]:
            for index, read in sources:
                for position in index.positions():
                    completion = read(position)
                    if completion.id not in here and completion.id not in seen:
                        seen.add(completion.id)
                        completion.messages = conversation(completion.messages, completion.turns)
                        yield completion
            for position in self.unused.index.positions():
                completion = self.unused.read(position)
                if completion.id not in seen:
                    yield completion

        write_rows(self.unused_path, Completion, rows(), {**provenance, "identity": self.identity})

    def close(self) -> None:
        self.journal.close()


def conversation(messages: list[Message], turns: list[Turn]) -> list[Message]:
    """The prompt's system and user messages with each turn's answer after its user message."""
    answers = iter(turns)
    whole: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            continue
        whole.append(message)
        if message.role == "user" and (turn := next(answers, None)) is not None:
            whole.append(Message("assistant", turn.content, turn.reasoning))
    return whole


def token_counts(turns: list[Turn]) -> tuple[int, int, float]:
    """(prompt tokens, output tokens, US dollars) of a prompt's turns."""
    input_tokens, output_tokens, cost = 0, 0, 0.0
    for turn in turns:
        input_tokens += len(turn.prompt_ids)
        output_tokens += len(turn.output_ids)
        cost += turn.cost_usd
    return input_tokens, output_tokens, cost


def link(source: Path, output: Path) -> None:
    """Give a finished file its declared name: a hard link, or a copy on another file system."""
    if output.exists() and output.samefile(source):
        return
    with durable.replacing(output) as temporary:
        durable.link_or_copy(source, temporary)
