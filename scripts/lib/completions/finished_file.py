"""A finished shard's Parquet file: found by id, and added up."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc

from scripts.lib.core.records import OUTCOMES, Completion, Turn, from_dict, open_parquet, read_columns, read_provenance

_GROUPS = 2  # of a file that are kept in memory


@dataclass
class Totals:
    """Sums over a shard's answered prompts."""

    outcomes: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def add(self, outcome: str, input_tokens: int, output_tokens: int, cost_usd: float) -> None:
        self.outcomes[outcome] += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.cost_usd += cost_usd

    def subtract(self, outcome: str, input_tokens: int, output_tokens: int, cost_usd: float) -> None:
        self.outcomes[outcome] -= 1
        self.input_tokens -= input_tokens
        self.output_tokens -= output_tokens
        self.cost_usd -= cost_usd

    def merge(self, other: "Totals") -> None:
        self.outcomes.update(other.outcomes)
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cost_usd += other.cost_usd

    def plain(self) -> dict:
        return {
            "outcomes": {name: self.outcomes[name] for name in OUTCOMES if self.outcomes[name]},
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost_usd": round(self.cost_usd, 6),
        }


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
        recorded = read_provenance(path).get("totals", {})
        self.totals.input_tokens = recorded.get("input_tokens", 0)
        self.totals.output_tokens = recorded.get("output_tokens", 0)
        self.totals.cost_usd = recorded.get("cost_usd", 0.0)
        self.totals.outcomes.update(recorded.get("outcomes", {}))
        for name in [name for name in self.totals.outcomes if OUTCOMES[name].resumable]:
            del self.totals.outcomes[name]

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

    def counts(self) -> Iterator[tuple[str, str, int, int, float]]:
        """(id, outcome, input tokens, output tokens, US dollars) of each answer, without making lists of its ids."""
        if not self.path.exists():
            return
        turn = "turns.list.element."
        columns = ["id", "outcome", f"{turn}prompt_ids", f"{turn}output_ids", f"{turn}cost_usd"]
        with open_parquet(self.path) as file:
            for batch in file.iter_batches(columns=columns):
                turns = batch.column("turns")
                offsets = turns.offsets.to_pylist()
                inputs, outputs = (
                    pc.list_value_length(turns.values.field(name)).to_pylist() for name in ("prompt_ids", "output_ids")
                )
                costs = turns.values.field("cost_usd").to_pylist()
                ids, outcomes = (batch.column(name).to_pylist() for name in ("id", "outcome"))
                for row, (prompt_id, outcome) in enumerate(zip(ids, outcomes)):
                    if not OUTCOMES[outcome].resumable:
                        own = slice(offsets[row], offsets[row + 1])
                        yield prompt_id, outcome, sum(inputs[own]), sum(outputs[own]), sum(costs[own])


def token_counts(turns: list[Turn]) -> tuple[int, int, float]:
    """(prompt tokens, output tokens, US dollars) of a prompt's turns."""
    input_tokens, output_tokens, cost = 0, 0, 0.0
    for turn in turns:
        input_tokens += len(turn.prompt_ids)
        output_tokens += len(turn.output_ids)
        cost += turn.cost_usd
    return input_tokens, output_tokens, cost
