"""What the finished completion shards hold, read column by column: no id ever becomes a Python object."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.lib.core.records import ROWS_PER_GROUP, open_parquet
from scripts.lib.core.secrets import without_secrets
from scripts.lib.validated.lengths import Lengths

_TURN = "turns.list.element."
# Everything but prompt ids and texts. The output ids are read for their number only.
_COLUMNS = [
    "outcome",
    "reason",
    "attempts",
    *(
        _TURN + name
        for name in (
            "output_ids", "finish_reason", "ids_origin", "model", "provider", "endpoint", "cost_usd", "seconds",
        )
    ),
]  # fmt: skip
REASON_LENGTH = 160
_LABELS = ("endpoint", "provider", "model", "ids_origin", "finish_reason")


@dataclass
class TurnSums:
    """Sums over turns. `seconds` adds up each turn's time from send to last byte."""

    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost_usd: float = 0.0
    at_limit: int = 0  # turns that ended at max_tokens

    def add(self, other: "TurnSums") -> None:
        for name in ("turns", "tokens", "seconds", "cost_usd", "at_limit"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def mean(self) -> float:
        """Mean tokens of an answer."""
        return self.tokens / self.turns if self.turns else 0.0


@dataclass
class AnswerSums:
    """Sums over the completions of a dataset."""

    prompts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)  # by outcome; numbers in them are written as N
    attempts: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    ids_origin: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    providers: Counter[str] = field(default_factory=Counter)
    endpoints: dict[tuple[str, str, str], TurnSums] = field(default_factory=dict)  # by endpoint, provider, model
    all: TurnSums = field(default_factory=TurnSums)
    lengths: Lengths = field(default_factory=Lengths)  # of each turn's output, the stop token included


def read_answers(paths: Iterable[Path]) -> AnswerSums:
    """Add up completion shards. Memory holds one row group. Raises UserError for a broken file."""
    answers = AnswerSums()
    for path in paths:
        with open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_GROUP, columns=_COLUMNS):
                _add(answers, batch)
    return answers


def _add(answers: AnswerSums, batch: pa.RecordBatch) -> None:
    answers.prompts += len(batch)
    answers.outcomes.update(_counts(batch["outcome"]))
    _add_reasons(answers, batch)
    answers.attempts += pc.sum(batch["attempts"]).as_py() or 0
    turns = pc.list_flatten(batch["turns"])
    if not len(turns):
        return
    lengths = pc.list_value_length(turns.field("output_ids"))
    answers.lengths.add(lengths.to_numpy(zero_copy_only=False).astype(np.int64))
    table = pa.table(
        {name: turns.field(name) for name in (*_LABELS, "seconds", "cost_usd")}
        | {"tokens": pc.cast(lengths, pa.int64())}
    )
    sums = [([], "count_all"), ("tokens", "sum"), ("seconds", "sum"), ("cost_usd", "sum")]
    for row in table.group_by(list(_LABELS)).aggregate(sums).to_pylist():
        count = row["count_all"]
        answers.finish_reasons[row["finish_reason"]] += count
        answers.ids_origin[row["ids_origin"]] += count
        answers.models[row["model"]] += count
        answers.providers[row["provider"]] += count
        part = TurnSums(
            turns=count,
            tokens=row["tokens_sum"],
            seconds=row["seconds_sum"],
            cost_usd=row["cost_usd_sum"],
            at_limit=count if row["finish_reason"] == "length" else 0,
        )
        key = (without_secrets(row["endpoint"]), row["provider"], row["model"])
        answers.endpoints.setdefault(key, TurnSums()).add(part)
        answers.all.add(part)


def _add_reasons(answers: AnswerSums, batch: pa.RecordBatch) -> None:
    told = pa.table({"outcome": batch["outcome"], "reason": batch["reason"]}).filter(pc.is_valid(batch["reason"]))
    for row in told.group_by(["outcome", "reason"]).aggregate([([], "count_all")]).to_pylist():
        # Ports, lengths and times would make every reason another one.
        reason = re.sub(r"\d+(\.\d+)?", "N", row["reason"])[:REASON_LENGTH]
        answers.reasons.setdefault(row["outcome"], Counter())[reason] += row["count_all"]


def _counts(values: pa.Array) -> dict[str, int]:
    return {row["values"]: row["counts"] for row in pc.value_counts(values).to_pylist()}


def read_prompt_lengths(paths: Iterable[Path]) -> Lengths:
    """Tokens of the first prompt of every conversation. Raises UserError for a broken file."""
    lengths = Lengths()
    for path in paths:
        with open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=65536, columns=["prompt_tokens"]):
                lengths.add(batch["prompt_tokens"].to_numpy(zero_copy_only=False))
    return lengths
