"""All shards of a run added up: the funnel from prompts to samples, why samples were refused, what they hold."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.validated.lengths import Lengths
from scripts.lib.validated.statistics import add_up

_SUMS = (
    "prompts", "outcomes", "without_sample", "samples", "passed", "rejects", "finish_reasons", "following_turns",
    "merged_turns", "reconstruction", "statistics",
)  # fmt: skip


def summarize(paths: Iterable[Path]) -> dict[str, Any]:
    """`{"datasets": {name: totals}, "total": totals}` of shard summaries; totals as in `_finished`."""
    shards: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        summary = durable.read_json(path)
        try:
            shards.setdefault(summary["dataset"], []).append({key: summary[key] for key in _SUMS})
        except KeyError as error:
            raise UserError(f"{path}: not a summary of validate_tokens (no {error}): delete it and run again") from None
    datasets = {name: add_up(parts) for name, parts in shards.items()}
    total = add_up(datasets.values())
    return {
        "datasets": {name: _finished(sums) for name, sums in datasets.items()},
        "total": _finished(total) if total else {},
    }


def _finished(sums: dict[str, Any]) -> dict[str, Any]:
    """Sums with rates, and percentiles in place of histograms."""
    statistics = dict(sums["statistics"])
    lengths = Lengths.of(statistics.pop("lengths")).percentiles()
    supervised = Lengths.of(statistics.pop("supervised_lengths")).percentiles()
    rejected = sum(sums["rejects"].values())
    return {
        **{key: value for key, value in sums.items() if key != "statistics"},
        "rejected": rejected,
        "reject_rate": _share(rejected, sums["samples"]),
        **{key: value for key, value in statistics.items() if key not in ("samples", "outcomes")},
        "sample_outcomes": statistics["outcomes"],
        "reasoning_share": _share(statistics["reasoning_tokens"], statistics["supervised_tokens"]),
        "merge_rate": _share(sums["merged_turns"], sums["following_turns"]),
        "reconstruction_drift": _share(sums["reconstruction"]["drifted"], sums["reconstruction"]["turns"]),
        "length": lengths,
        "supervised_length": supervised,
    }


def _share(part: int, whole: int) -> float | None:
    """None when there is nothing to take a share of."""
    return round(part / whole, 6) if whole else None


def require_acceptable(summary: dict[str, Any], max_reject_rate: float) -> None:
    """Raise UserError, naming datasets and checks, when too many samples of a dataset were refused."""
    faults = []
    for name, totals in summary["datasets"].items():
        if (totals["reject_rate"] or 0) > max_reject_rate:
            checks = sorted(totals["rejects"].items(), key=lambda item: -item[1])
            faults.append(
                f"{name}: {totals['rejected']} of {totals['samples']} samples refused "
                f"({', '.join(f'{check} {count}' for check, count in checks)})"
            )
    if faults:
        raise UserError(
            f"validation: more than {max_reject_rate:.0%} of a dataset was refused: {'; '.join(faults)}: look at "
            "results/validated/*/*.rejects.parquet (`python -m scripts.show FILE`), then mend the cause or raise "
            "validation.max_reject_rate"
        )


# What each table of the summary shows of a dataset's totals: heading to text.
_FUNNEL: dict[str, Callable[[dict[str, Any]], str]] = {
    "prompts": lambda totals: f"{totals['prompts']:,}",
    "no sample": lambda totals: f"{sum(totals['without_sample'].values()):,}",
    "samples": lambda totals: f"{totals['samples']:,}",
    "refused": lambda totals: f"{totals['rejected']:,}",
    "passed": lambda totals: f"{totals['passed']:,}",
}
_PASSED: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens": lambda totals: f"{totals['tokens']:,}",
    "supervised": lambda totals: f"{totals['supervised_tokens']:,}",
    "p50": lambda totals: str(totals["length"].get("p50", "-")),
    "p99": lambda totals: str(totals["length"].get("p99", "-")),
    "thought": lambda totals: _percent(totals["reasoning_share"]),
    "merged": lambda totals: _percent(totals["merge_rate"]),
    "drift": lambda totals: _percent(totals["reconstruction_drift"]),
}


def print_tables(console: Console, summary: dict[str, Any]) -> None:
    """The funnel and what passed, one row per dataset, and the checks that refused samples. Fits 80 columns."""
    rows = [*summary["datasets"].items(), ("total", summary["total"])] if summary["total"] else []
    for title, columns in (("From prompts to samples", _FUNNEL), ("What passed", _PASSED)):
        table = Table("dataset", *(Column(heading, justify="right") for heading in columns))
        for name, totals in rows:
            table.add_row(name, *(text(totals) for text in columns.values()))
        console.print(title)
        console.print(table)
    for title, key in (
        ("Prompts without a sample, by outcome", "without_sample"),
        ("Samples refused, by check", "rejects"),
    ):
        if any(totals[key] for _, totals in rows):
            table = Table("dataset", "reason", "count")
            for name, totals in rows[:-1]:
                for reason, count in totals[key].items():
                    table.add_row(name, reason, f"{count:,}")
            console.print(title)
            console.print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
