"""A server's load, read from what it publishes for Prometheus."""

import contextlib
import math
import re
from dataclasses import dataclass

_LINE = re.compile(r"^(?:\w+:)?(?P<name>\w+)(?:\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)


@dataclass(slots=True, frozen=True)
class EngineMetrics:
    """What a server says about its load. None: this engine (or version) does not tell."""

    running: int | None = None  # requests being decoded
    queued: int | None = None  # requests that wait for a slot
    kv_usage: float | None = None  # share of the key-value cache in use, 0 to 1
    generated: int | None = None  # tokens generated since the server started


@dataclass(slots=True, frozen=True)
class MetricNames:
    """The series that an engine publishes, without its prefix. Of several names of one thing the first one present counts."""

    running: tuple[str, ...]
    queued: tuple[str, ...]
    kv_usage: tuple[str, ...]
    generated: tuple[str, ...]
    progress: tuple[str, ...]  # all that move while the server works, whether or not an answer ends
    path: str = "/metrics"


def read_metrics(names: MetricNames, text: str) -> tuple[EngineMetrics, tuple]:
    """Load of a server, and a mark that changes whenever it did some work.

    A series that comes once per data-parallel rank is summed (a share is averaged).
    """
    values: dict[str, list[float]] = {}
    for line in _LINE.finditer(text):
        with contextlib.suppress(ValueError):
            number = float(line["value"])
            if math.isfinite(number):  # what was never measured is NaN
                values.setdefault(line["name"], []).append(number)

    def whole(candidates: tuple[str, ...]) -> int | None:
        found = _first(candidates, values)
        return int(sum(found)) if found else None

    usage = _first(names.kv_usage, values)
    metrics = EngineMetrics(
        running=whole(names.running),
        queued=whole(names.queued),
        kv_usage=sum(usage) / len(usage) if usage else None,
        generated=whole(names.generated),
    )
    return metrics, tuple(tuple(values.get(name, ())) for name in names.progress)


def _first(candidates: tuple[str, ...], values: dict[str, list[float]]) -> list[float]:
    return next((values[name] for name in candidates if name in values), [])
