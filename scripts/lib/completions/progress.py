"""How far the run is: log lines at once and every few seconds, and one JSON file for the whole run.

Every job writes `state/progress/{dataset}/{shard}.json` and then adds all of them up into
`results/progress.json` (config/progress.schema.json says what is in it). Rates and ETA come from the
tokens of a window, not from the start: short answers come first, so early averages mislead.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.locks import hold
from scripts.lib.core.paths import State
from scripts.lib.core.records import OUTCOMES
from scripts.lib.core.units import duration, short

_WINDOW = 120.0  # seconds
_SILENT_SECONDS = 60.0  # after which a job that has not ended properly counts as stopped
_LIVE = ("waiting", "running")

Status = Literal["pending", "waiting", "running", "done", "stopped", "failed"]


class Figures(BaseModel):
    """What is counted, for a shard, a dataset or the whole run."""

    model_config = ConfigDict(extra="forbid")

    total: int = Field(0, ge=0, description="Prompts.")
    completed: int = Field(0, ge=0, description="Prompts with an answer (ok, length, reasoning_only).")
    failed: int = Field(0, ge=0, description="Prompts that ended without an answer; `outcomes` tells why.")
    resumed: int = Field(0, ge=0, description="Prompts that had their outcome before this job began.")
    in_flight: int = Field(0, ge=0)
    retried: int = Field(0, ge=0, description="Sends that failed and were made again.")
    rate_per_sec: float = Field(0.0, ge=0, description="Prompts per second, in the last two minutes.")
    tokens_per_sec: float = Field(0.0, ge=0, description="Output tokens per second, in the last two minutes.")
    eta_hours: float | None = Field(None, description="Hours left; null while nobody can know.")
    total_input_tokens: int = Field(0, ge=0)
    total_output_tokens: int = Field(0, ge=0)
    avg_output_tokens: float = Field(0.0, ge=0)
    cost_usd: float = Field(0.0, ge=0)
    elapsed_hours: float = Field(0.0, ge=0)
    outcomes: dict[str, int] = Field(default_factory=dict)
    status: Status = "pending"


class RunProgress(Figures):
    """results/progress.json."""

    updated: float = Field(description="Seconds since 1970.")
    datasets: dict[str, Figures]
    s3_uploaded: int = Field(0, ge=0, description="Files that `upload.target` holds, verified.")
    s3_bytes: int = Field(0, ge=0)
    s3_failed: int = Field(0, ge=0, description="Files whose last attempt failed; they are tried again.")


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of results/progress.json."""
    made = RunProgress.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "Progress of a run"}


class Meter:
    """Counts one job's progress. Times come from an injected clock, in seconds."""

    def __init__(self, name: str, total: int, clock: Callable[[], float]) -> None:
        self.name, self.total, self.clock = name, total, clock
        self.begun = clock()
        self.outcomes: Counter[str] = Counter()
        self.resumed = 0
        self.input_tokens = self.output_tokens = 0
        self.cost_usd = 0.0
        self.in_flight = 0
        self.retried = 0
        self._window: deque[tuple[float, int, int]] = deque([(self.begun, 0, 0)])
        self._fresh = self._fresh_tokens = 0  # finished by this job

    def resume(self, outcomes: Counter[str], input_tokens: int, output_tokens: int, cost_usd: float) -> None:
        """Take over what earlier jobs of this shard have finished."""
        self.outcomes.update(outcomes)
        self.resumed = outcomes.total()
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.cost_usd += cost_usd

    def add(self, outcome: str, input_tokens: int, output_tokens: int) -> None:
        """A prompt has its outcome. Money is added to `cost_usd` by whoever spends it."""
        self.outcomes[outcome] += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self._fresh += 1
        self._fresh_tokens += output_tokens

    def remove(self, outcome: str, input_tokens: int, output_tokens: int) -> None:
        """An answer was discarded; its cost stays."""
        self.outcomes[outcome] -= 1
        self.input_tokens -= input_tokens
        self.output_tokens -= output_tokens

    def figures(self, status: Status) -> Figures:
        """The figures now."""
        now = self.clock()
        self._window.append((now, self._fresh, self._fresh_tokens))
        while len(self._window) > 2 and now - self._window[1][0] >= _WINDOW:
            self._window.popleft()
        then, fresh, tokens = self._window[0]
        span = max(now - then, 1e-9)
        rate, token_rate = (self._fresh - fresh) / span, (self._fresh_tokens - tokens) / span
        done = self.outcomes.total()
        completed = sum(count for name, count in self.outcomes.items() if OUTCOMES[name].answered)
        return Figures(
            total=self.total,
            completed=completed,
            failed=done - completed,
            resumed=self.resumed,
            in_flight=self.in_flight,
            retried=self.retried,
            rate_per_sec=round(rate, 3),
            tokens_per_sec=round(token_rate, 1),
            eta_hours=self._eta(done, rate, token_rate),
            total_input_tokens=self.input_tokens,
            total_output_tokens=self.output_tokens,
            avg_output_tokens=round(self.output_tokens / done, 1) if done else 0.0,
            cost_usd=round(self.cost_usd, 4),
            elapsed_hours=round((now - self.begun) / 3600, 4),
            outcomes={name: count for name, count in sorted(self.outcomes.items()) if count},
            status=status,
        )

    def _eta(self, done: int, rate: float, token_rate: float) -> float | None:
        """Hours left, by the tokens that are still to come.

        None until as many answers have come as are in flight: before that the mean length is that of
        the shortest answers only.
        """
        left = self.total - done
        if left <= 0:
            return 0.0
        if not self._fresh or self._fresh < self.in_flight:
            return None
        mean = self._fresh_tokens / self._fresh
        seconds = left * mean / token_rate if token_rate else left / rate if rate else None
        return None if seconds is None else round(seconds / 3600, 4)


def line(name: str, figures: Figures) -> str:
    """One log line. `ok` are prompts with an answer, `cut` of these reached max_tokens.

    `code/000 2550/3572 ok 2550 err 0 · 27.0/s · 4.8k tok/s · avg 176 tok · $1.02 · 1,998 in flight · eta 0:38`.
    """
    done = figures.completed + figures.failed
    parts = [
        f"{name} {done}/{figures.total} ok {figures.completed} err {figures.failed}",
        f"{figures.rate_per_sec:.1f}/s",
        f"{short(figures.tokens_per_sec)} tok/s",
        f"avg {figures.avg_output_tokens:.0f} tok",
    ]
    if figures.cost_usd:
        parts.append(f"${figures.cost_usd:.2f}")
    parts.append(f"{figures.in_flight:,} in flight")
    if cut := figures.outcomes.get("length", 0):
        parts.append(f"{cut:,} cut")
    if figures.retried:
        parts.append(f"{figures.retried:,} retried")
    parts.append(f"eta {duration(figures.eta_hours)}")
    return " · ".join(parts)


class ProgressFile:
    """Writes this job's part and the sum of all parts."""

    def __init__(self, state: Path, config: Config, dataset: str, shard: str) -> None:
        self.state, self.config = State(state), config
        self.part = self.state.progress(dataset, shard)
        self._rows: dict[Path, int] = {}

    def write(self, figures: Figures, line_seconds: float = 0.0) -> "RunProgress | None":
        """Replace both files. Cheap enough for every few seconds; may run in a thread.

        Returns the whole run's figures to the one job whose turn it is to say them: when no job has
        for `line_seconds`.
        """
        durable.write_json(self.part, {**figures.model_dump(), "updated": time.time()})
        return self.write_sum(line_seconds)

    def write_sum(self, line_seconds: float = 0.0) -> "RunProgress | None":
        """Replace progress.json by the sum of all parts. Returns as `write` does."""
        # One job at a time: else a slower job could replace a newer sum, the run's last one too, by an older one.
        # The lock file's own time says when the run was last spoken of.
        with hold(self.state.progress_lock) as lock:
            run = self.gather()
            durable.write_json(self.state.results.progress, run.model_dump())
            silent = run.updated - os.fstat(lock.descriptor).st_mtime
            if run.status == "done":  # the last job to end says so
                return run
            if run.status not in _LIVE or 0 <= silent < line_seconds:
                return None
            os.utime(lock.descriptor)
            return run

    def gather(self) -> RunProgress:
        """Add up the parts of all class-B datasets; shards that haven't begun count with their prompts."""
        datasets: dict[str, Figures] = {}
        for name in self.config.by_class("B"):
            parts = [self._part(name, shard) for shard in self.config.shard_names()]
            datasets[name] = total_of(parts)
        whole = total_of(list(datasets.values()))
        return RunProgress(**whole.model_dump(), updated=time.time(), datasets=datasets, **self._uploads())

    def _uploads(self) -> dict[str, int]:
        """The counts of upload_results, {} when nothing is uploaded."""
        counts = _read(self.state.upload_counts)
        names = ("s3_uploaded", "s3_bytes", "s3_failed")
        return {name: counts[name] for name in names if isinstance(counts.get(name), int) and counts[name] >= 0}

    def _part(self, dataset: str, shard: str) -> Figures:
        part = read_part(self.state, dataset, shard)
        if part is None:
            return Figures(total=self._prompts(self.state.results.shard("prompts", dataset, shard)))
        figures, updated = part
        if figures.status in _LIVE and time.time() - updated > _SILENT_SECONDS:
            # Killed jobs can't say so.
            figures.status, figures.in_flight, figures.rate_per_sec, figures.tokens_per_sec = "stopped", 0, 0.0, 0.0
        return figures

    def _prompts(self, path: Path) -> int:
        if path not in self._rows:
            try:
                self._rows[path] = pq.read_metadata(path).num_rows
            except (OSError, ValueError):
                return 0  # not made yet
        return self._rows[path]


def read_part(state: State, dataset: str, shard: str) -> tuple[Figures, float] | None:
    """What the last job of a shard said, and when; None when none did, or what is there can't be read."""
    values = _read(state.progress(dataset, shard))
    updated = values.pop("updated", None)
    try:
        return (Figures(**values), float(updated)) if isinstance(updated, int | float) else None
    except ValueError:
        return None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that is missing or holds something else: it is written again soon."""
    try:
        values = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def total_of(parts: list[Figures]) -> Figures:
    """The sum of figures. The ETA is that of all remaining tokens at the present rates."""
    if not parts:
        return Figures(status="done")
    total: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("total", "completed", "failed", "resumed", "retried", "total_input_tokens", "total_output_tokens")
    }
    live = [part for part in parts if part.status in _LIVE]
    for name in ("in_flight", "rate_per_sec", "tokens_per_sec"):
        total[name] = round(sum(getattr(part, name) for part in live), 3)
    outcomes: Counter[str] = Counter()
    for part in parts:
        outcomes.update(part.outcomes)
    done = total["completed"] + total["failed"]
    mean = total["total_output_tokens"] / done if done else 0.0
    left = total["total"] - done
    known = left and total["tokens_per_sec"] and all(part.eta_hours is not None for part in live)
    return Figures(
        **total,
        eta_hours=0.0 if not left else round(left * mean / total["tokens_per_sec"] / 3600, 4) if known else None,
        avg_output_tokens=round(mean, 1),
        cost_usd=round(sum(part.cost_usd for part in parts), 4),
        elapsed_hours=max(part.elapsed_hours for part in parts),
        outcomes=dict(sorted(outcomes.items())),
        status=_status([part.status for part in parts]),
    )


def _status(parts: list[Status]) -> Status:
    for status in ("failed", "running", "waiting", "stopped"):
        if status in parts:
            return status
    return "done" if all(part == "done" for part in parts) else "running" if "done" in parts else "pending"
