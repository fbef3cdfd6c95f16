"""A finished shard's Parquet file: found by id, and added up."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.lib.completions.budget import Amount
from scripts.lib.completions.journal_records import Ended, FirstTurn
from scripts.lib.core.records import OUTCOMES, Completion, batches, from_dict, open_parquet, provenance_in
from scripts.lib.prompts.shard import id_lists, ids_digest

_GROUPS = 2  # of a file that are kept in memory


@dataclass
class Totals:
    """Sums over a shard's answered prompts."""

    outcomes: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    paid: Amount = field(default_factory=Amount)  # by this shard; what was taken from another one, that has paid

    def add(self, ended: Ended, taken_from: str = "") -> None:
        self.outcomes[ended.outcome] += 1
        self.input_tokens += ended.input_tokens
        self.output_tokens += ended.output_tokens
        self.cost_usd += ended.cost_usd
        if not taken_from:
            self.paid = self.paid + Amount(ended.billed_tokens, ended.cost_usd)

    def subtract(self, ended: Ended, taken_from: str = "") -> None:
        self.outcomes[ended.outcome] -= 1
        self.input_tokens -= ended.input_tokens
        self.output_tokens -= ended.output_tokens
        self.cost_usd -= ended.cost_usd
        if not taken_from:
            self.paid = self.paid - Amount(ended.billed_tokens, ended.cost_usd)

    def merge(self, other: "Totals") -> None:
        self.outcomes.update(other.outcomes)
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cost_usd += other.cost_usd
        self.paid = self.paid + other.paid

    def plain(self) -> dict:
        return {
            "outcomes": {name: self.outcomes[name] for name in OUTCOMES if self.outcomes[name]},
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost_usd": round(self.cost_usd, 6),
            "paid": {"tokens": self.paid.tokens, "cost_usd": round(self.paid.cost, 6)},
        }

    @classmethod
    def recorded(cls, plain: dict) -> "Totals":
        """What `plain` wrote, without prompts that were not asked."""
        inputs, outputs = plain.get("input_tokens", 0), plain.get("output_tokens", 0)
        cost = plain.get("cost_usd", 0.0)
        paid = plain.get("paid", {"tokens": inputs + outputs, "cost_usd": cost})  # files of before don't tell
        outcomes = {name: count for name, count in plain.get("outcomes", {}).items() if not OUTCOMES[name].resumable}
        return cls(Counter(outcomes), inputs, outputs, cost, Amount(paid["tokens"], paid["cost_usd"]))


class FinishedFile:
    """A finished Parquet file, looked up by id. Rows of `over_budget` are not answers."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a broken file; one that isn't there holds nothing. Stays open: it may be replaced."""
        self.path = path
        self.rows: dict[str, int] = {}  # where the answers lie
        self.totals = Totals()  # without over_budget
        self.identity: dict | None = None  # that its answers were made with
        self.order: str | None = None  # digest of the ids in their order; None when rows are over budget
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        if not path.exists():
            return
        self._file = open_parquet(path)
        metadata = self._file.metadata
        self._group_rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        unpaid, order, row = 0, hashlib.sha256(), 0
        for batch in batches(self._file, ["id", "outcome"]):
            for prompt_id, outcome in zip(*(column.to_pylist() for column in batch.columns)):
                order.update(prompt_id.encode())
                if OUTCOMES[outcome].resumable:
                    unpaid += 1
                else:
                    self.rows[prompt_id] = row
                row += 1
        self.order = None if unpaid else order.hexdigest()
        provenance = provenance_in(self._file)
        self.identity = provenance.get("identity")
        self.totals = Totals.recorded(provenance.get("totals", {}))

    def read(self, row: int) -> Completion:
        """The completion in `row`; a few row groups are kept in memory, as Arrow's numbers."""
        group = 0
        while row >= self._group_rows[group]:
            row -= self._group_rows[group]
            group += 1
        if group not in self._tables:
            self._tables[group] = self._file.read_row_group(group)
            if len(self._tables) > _GROUPS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        return from_dict(Completion, self._tables[group].slice(row, 1).to_pylist()[0])

    def first_turns(self, wanted: Set[str]) -> Iterator[FirstTurn]:
        """Of the answers to some prompts."""
        if not self.rows.keys() & wanted:
            return
        names = ("prompt_ids", "output_ids", "seed")
        for batch in batches(self._file, ["id", *(f"turns.list.element.{name}" for name in names)]):
            turns = batch.column("turns")
            offsets = turns.offsets.to_pylist()
            sent, made = (list(id_lists(turns.values.field(name))) for name in names[:2])
            seeds = turns.values.field("seed").to_pylist()
            for row, prompt_id in enumerate(batch.column("id").to_pylist()):
                first = offsets[row]
                if prompt_id in wanted and first < offsets[row + 1]:
                    yield FirstTurn(prompt_id, ids_digest(sent[first]), ids_digest(made[first], seeds[first]))

    def ended(self) -> Iterator[tuple[str, Ended]]:
        """How each answered prompt ended, by id, without making lists of its answers' ids."""
        if not self.rows:
            return
        turn = "turns.list.element."
        # Files of before don't tell what was billed.
        billed = ["billed_tokens"] * (_turn_fields(self._file).get_field_index("billed_tokens") >= 0)
        names = [f"{turn}{name}" for name in ("prompt_ids", "output_ids", "cost_usd", *billed)]
        for batch in batches(self._file, ["id", "outcome", *names]):
            turns = batch.column("turns")
            offsets = turns.offsets.to_pylist()
            inputs, outputs = (
                pc.list_value_length(turns.values.field(name)).to_pylist() for name in ("prompt_ids", "output_ids")
            )
            costs = turns.values.field("cost_usd").to_pylist()
            tokens = turns.values.field("billed_tokens").to_pylist() if billed else [0] * len(costs)
            tokens = [told or sum(counted) for told, *counted in zip(tokens, inputs, outputs)]
            ids, outcomes = (batch.column(name).to_pylist() for name in ("id", "outcome"))
            for row, (prompt_id, outcome) in enumerate(zip(ids, outcomes)):
                if not OUTCOMES[outcome].resumable:
                    own = slice(offsets[row], offsets[row + 1])
                    sums = (sum(column[own]) for column in (inputs, outputs, costs, tokens))
                    yield prompt_id, Ended(outcome, *sums)


def _turn_fields(file: pq.ParquetFile) -> pa.StructType:
    return file.schema_arrow.field("turns").type.value_type
