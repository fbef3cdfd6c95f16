"""What became of a dataset's rows: counts by reason with examples, whose totals add up."""

from dataclasses import dataclass, field
from typing import Any

from scripts.lib.prompts.defects import CHANGES, DEFECTS, NOT_USED

EXAMPLES = 20


@dataclass
class Tally:
    """Counts by reason, with the first examples of each."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    longest: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, source: str, detail: str = "", id: str = "") -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            entry = {"source": source, "id": id, "detail": detail}
            examples.append({name: text for name, text in entry.items() if text})

    @property
    def defects(self) -> int:
        return sum(count for reason, count in self.dropped.items() if reason in DEFECTS)

    def first_defects(self, limit: int = 5) -> str:
        """`reason count (file:row detail)` of the most frequent defects."""
        named = sorted((r for r in self.dropped if r in DEFECTS), key=lambda reason: -self.dropped[reason])
        parts = []
        for reason in named[:limit]:
            example = self.examples[reason][0]
            detail = f": {example['detail']}" if "detail" in example else ""
            parts.append(f"{reason} x{self.dropped[reason]} ({example['source']}{detail})")
        return "; ".join(parts)

    def report(self, name: str, data_class: str, shards: list[int], provenance: dict[str, Any]) -> dict[str, Any]:
        """The content of report.json. `shards` are the rows written to each shard."""
        dropped = sum(self.dropped.values())
        if self.rows != self.kept + dropped or sum(shards) != self.kept:
            raise AssertionError(f"{name}: {self.rows} rows, {self.kept} kept, {dropped} dropped, shards {shards}")
        meanings = DEFECTS | NOT_USED
        return {
            "dataset": name,
            "class": data_class,
            "rows": self.rows,
            "kept": self.kept,
            "dropped": dropped,
            "prompt_tokens": self.tokens,
            "longest_prompt": self.longest,
            "shards": shards,
            "reasons": {
                reason: {
                    "count": self.dropped[reason],
                    "meaning": meanings[reason],
                    "examples": self.examples[reason],
                }
                for reason in meanings
                if reason in self.dropped
            },
            "changes": {
                change: {"count": self.changed[change], "meaning": meaning}
                for change, meaning in CHANGES.items()
                if change in self.changed
            },
            "sources": provenance["sources"],
            "settings": provenance["settings"],
        }


def summary(report: dict[str, Any]) -> str:
    """One line for people: `chat: 24 rows, 21 kept, dropped: duplicate 2, empty_turn 1`."""
    reasons = ", ".join(f"{reason} {entry['count']}" for reason, entry in report["reasons"].items())
    return (
        f"{report['dataset']}: {report['rows']:,} rows, {report['kept']:,} kept"
        + (f", dropped: {reasons}" if reasons else "")
        + f"; {report['prompt_tokens']:,} prompt tokens, the longest has {report['longest_prompt']:,}"
    )
