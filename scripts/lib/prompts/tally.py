"""What became of a dataset's rows: counts by reason with examples, whose totals add up."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.prompts.defects import CHANGES, DEFECTS, NOT_USED
from scripts.lib.prompts.sources.formats import Conversation

EXAMPLES = 20
# Names that rows bring (columns, words) and that are counted: rows without a schema could bring new ones for ever.
_MOST_NAMES = 10_000
COLUMNS_TOLD = 6
# A beginning that this share of a source's conversations has is worth telling.
COMMON_SHARE = 0.05
# Blanks, a tag, or a word: how an answer begins.
_BEGINNING = re.compile(r"\s+|<[^<>\s]{1,30}>|\S{1,24}")


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
    unused: dict[str, list[int]] = field(default_factory=dict)  # column -> [rows, characters]
    answered: int = 0  # conversations with answers of the source (class A)
    beginnings: dict[str, int] = field(default_factory=dict)  # of their answers -> conversations

    def take(self, conversation: Conversation, changes: Iterable[str], unused: dict[str, int]) -> None:
        """Count what is remarkable about a row that became a candidate."""
        for change in changes:
            self.changed[change] = self.changed.get(change, 0) + 1
        for column, characters in unused.items():
            if column in self.unused or len(self.unused) < _MOST_NAMES:
                counts = self.unused.setdefault(column, [0, 0])
                counts[0] += 1
                counts[1] += characters
        answers = [message.content for message in conversation.messages if message.role == "assistant"]
        self.answered += bool(answers)
        for beginning in {match[0] for text in answers if (match := _BEGINNING.match(text))}:
            if beginning in self.beginnings or len(self.beginnings) < _MOST_NAMES:
                self.beginnings[beginning] = self.beginnings.get(beginning, 0) + 1

    def keep(self, length: int) -> None:
        """Count a prompt that is used, of so many tokens."""
        self.kept += 1
        self.tokens += length
        self.longest = max(self.longest, length)

    def drop(self, reason: str, source: str, detail: str = "", own_id: str = "") -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            entry = {"source": source, "id": own_id, "detail": detail}
            examples.append({name: text for name, text in entry.items() if text})

    @property
    def defects(self) -> int:
        return sum(count for reason, count in self.dropped.items() if reason in DEFECTS)

    def first_reasons(self, limit: int = 5) -> str:
        """`reason xcount (file:row: detail)` of the most frequent reasons, defects before others."""
        named = sorted(self.dropped, key=lambda reason: (reason not in DEFECTS, -self.dropped[reason]))
        parts = []
        for reason in named[:limit]:
            example = self.examples[reason][0]
            detail = f": {example['detail']}" if "detail" in example else ""
            parts.append(f"{reason} x{self.dropped[reason]} ({example['source']}{detail})")
        return "; ".join(parts)

    def common_beginnings(self) -> dict[str, int]:
        """How the source's own answers begin, where many begin alike: beginning -> conversations."""
        common = [(text, count) for text, count in self.beginnings.items() if count >= COMMON_SHARE * self.answered]
        return dict(sorted(common, key=lambda pair: (-pair[1], pair[0]))) if self.answered > 1 else {}

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
            # The longest first: what a prompt may be missing.
            "unused_columns": {
                name: {"rows": rows, "characters": characters}
                for name, (rows, characters) in sorted(self.unused.items(), key=lambda item: (-item[1][1], item[0]))
            },
            "answers_begin_with": self.common_beginnings(),
            "answered": self.answered,
            "sources": provenance["sources"],
            "settings": provenance["settings"],
        }


def summary(report: dict[str, Any]) -> str:
    """One line for people: `chat: 24 rows, 21 kept, dropped: duplicate 2, empty_turn 1; unused columns: context 24; ...`."""
    reasons = ", ".join(f"{reason} {entry['count']}" for reason, entry in report["reasons"].items())
    columns = list(report["unused_columns"].items())
    unused = ", ".join(f"{name} {entry['rows']:,}" for name, entry in columns[:COLUMNS_TOLD])
    unused += f" and {len(columns) - COLUMNS_TOLD} more" if len(columns) > COLUMNS_TOLD else ""
    # A word that answers share says something about the subject; blanks and tags are somebody's format.
    common = report["answers_begin_with"].items()
    begin = ", ".join(f"{text!r} {count:,} of {report['answered']:,}" for text, count in common if _is_format(text))
    return (
        f"{report['dataset']}: {report['rows']:,} rows, {report['kept']:,} kept"
        + (f", dropped: {reasons}" if reasons else "")
        + (f"; unused columns: {unused}" if unused else "")
        + (f"; answers begin with {begin}" if begin else "")
        + f"; {report['prompt_tokens']:,} prompt tokens, the longest has {report['longest_prompt']:,}"
    )


def _is_format(beginning: str) -> bool:
    return beginning.isspace() or beginning.startswith("<")
