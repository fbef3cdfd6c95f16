"""Time, memory and money of a run: from Snakemake's benchmark files and from the progress of generation."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import orjson

from scripts.lib.completions.progress import read_part
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import Results
from scripts.lib.report.run import Run

Interval = tuple[float, float]  # seconds since 1970


@dataclass(slots=True)
class RuleCost:
    """All measured jobs of a rule. Seconds; memory is the largest job's, in MB."""

    rule: str
    jobs: int
    seconds: float
    longest: float
    cpu_seconds: float
    max_rss: float
    span: float  # time with at least one of its jobs running


@dataclass(slots=True)
class Speed:
    """Generation as a whole. `seconds`: time with at least one job generating, loading of models included."""

    seconds: float
    fresh_tokens: int  # output tokens of the jobs that were measured: answers of earlier jobs are not among them
    resumed: int  # prompts that earlier jobs had answered

    @property
    def tokens_per_second(self) -> float | None:
        return self.fresh_tokens / self.seconds if self.seconds and self.fresh_tokens else None


def union(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one interval."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def rule_costs(results: Results) -> tuple[list[RuleCost], list[Interval]]:
    """Cost by rule in the order in which rules began, and when their jobs ran.

    A benchmark file is written when its job ends, so its time minus its seconds is when the job began.
    """
    folder = results.benchmarks
    jobs: dict[str, list[tuple[Interval, dict]]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        rule = path.relative_to(folder).parts[0].removesuffix(".jsonl")
        end = path.stat().st_mtime
        for record in _records(path):
            seconds = _number(record.get("s"))
            jobs.setdefault(rule, []).append(((end - seconds, end), record))
    costs = []
    for rule, measured in sorted(jobs.items(), key=lambda item: min(interval for interval, _ in item[1])):
        times = [end - start for (start, end), _ in measured]
        costs.append(
            RuleCost(
                rule=rule,
                jobs=len(measured),
                seconds=sum(times),
                longest=max(times),
                cpu_seconds=sum(_number(record.get("cpu_time")) for _, record in measured),
                max_rss=max(_number(record.get("max_rss")) for _, record in measured),
                span=union(interval for interval, _ in measured),
            )
        )
    return costs, [interval for measured in jobs.values() for interval, _ in measured]


def _records(path: Path) -> list[dict]:
    try:
        return [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not a benchmark file of Snakemake ({error}): delete it") from None


def _number(value: object) -> float:
    """Snakemake writes NA for what it could not measure of a short job."""
    return float(value) if isinstance(value, int | float) else 0.0


def generation_speed(run: Run) -> tuple[Speed, list[Interval]]:
    """Speed of the last job of every generated shard, and when those jobs ran."""
    intervals: list[Interval] = []
    fresh = 0.0
    for name in run.config.by_class("B"):
        for shard in run.config.shard_names():
            said = read_part(run.results.state, name, shard)
            if said is None:
                continue
            part, updated = said
            done = part.completed + part.failed
            # Tokens of resumed answers are not told apart: their share of the prompts is taken.
            if done > part.resumed:
                fresh += part.total_output_tokens * (done - part.resumed) / done
            intervals.append((updated - part.elapsed_hours * 3600, updated))
    return Speed(union(intervals), round(fresh), run.progress.resumed), intervals
