"""A finished shard's Parquet file: found by id, and added up."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.lib.completions.budget import Amount
from scripts.lib.completions.journal_records import Ended
from scripts.lib.core.records import OUTCOMES, Completion, from_dict, open_parquet, read_columns, read_provenance

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
        self.path = path
        self.rows: dict[str, int] = {}  # where the answers lie
        self.totals = Totals()  # without over_budget
        self.order: str | None = None  # digest of the ids in their order; None when rows are over budget
        self._groups: OrderedDict[int, list[dict]] = OrderedDict()
        if not path.exists():
            return
        unpaid, order = 0, hashlib.sha256()
        with open_parquet(path) as file:
            self.group_rows = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        for row, (prompt_id, outcome) in enumerate(read_columns(path, ["id", "outcome"])):
            order.update(prompt_id.encode())
            if OUTCOMES[outcome].resumable:
                unpaid += 1
            else:
                self.rows[prompt_id] = row
        self.order = None if unpaid else order.hexdigest()
        provenance = read_provenance(path)
        self.totals = Totals.recorded(provenance.get("totals", {}))

    def read(self, row: int) -> Completion:
        """The completion in `row`; a few row groups are kept in memory."""
        group = 0
        while row >= self.group_rows[group]:
            row -= self.group_rows[group]
            group += 1
        if group not in self._groups:
            with open_parquet(self.path) as file:
                self._groups[group] = file.read_row_group(group).to_pylist()
            if len(self._groups) > _GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return from_dict(Completion, self._groups[group][row])

    def ended(self) -> Iterator[tuple[str, Ended]]:
        """How each answered prompt ended, by id, without making lists of its answers' ids."""
        if not self.rows:
            return
        turn = "turns.list.element."
        with open_parquet(self.path) as file:
            # Files of before don't tell what was billed.
            billed = ["billed_tokens"] * (_turn_fields(file).get_field_index("billed_tokens") >= 0)
            names = [f"{turn}{name}" for name in ("prompt_ids", "output_ids", "cost_usd", *billed)]
            for batch in file.iter_batches(columns=["id", "outcome", *names]):
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
