"""What an export tells of itself: what it kept, what its format could not hold, how to set the trainer up."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from scripts.lib.core.records import Sample


@dataclass(slots=True)
class Report:
    """The content of export.json. `read` = `rows`' samples + the sum of `left_out`."""

    format: str
    version: str
    read: int = 0  # samples of the corpus
    rows: int = 0  # written; a format may hold several rows for one sample
    files: list[str] = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)  # samples that the format can't hold, by reason
    lost: Counter = field(default_factory=Counter)  # facts of samples that are there, by name
    settings: dict[str, Any] = field(default_factory=dict)  # what to tell the trainer
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values, counters in order of their names."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {name: dict(sorted(values[name].items())) for name in ("left_out", "lost")}

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield f"{self.read} samples, {self.rows} rows in {len(self.files)} files"
        for reason, count in sorted(self.left_out.items()):
            yield f"left out: {count} samples: {reason}"
        for fact, count in sorted(self.lost.items()):
            yield f"lost: {count} samples: {fact}"
        for name, value in self.settings.items():
            yield f"tell the trainer: {name}: {value}"
        yield from self.notes


def unrenderable(sample: Sample) -> str | None:
    """Why no text stands for a sample: a template would end it with what the target never said. None if some does."""
    if not sample.messages:
        return "ready tokens without messages"
    if 1 not in sample.loss_mask:
        return "no supervised token"
    if "truncated" in sample.flags:
        return "truncated answer: rendered, it would end with a stop token"
    if "reasoning_only" in sample.flags:
        return "unfinished thought: rendered, it would be closed"
    return None
