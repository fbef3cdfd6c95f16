"""Whether a server works: a real generation says that it is ready, token progress that it isn't stuck."""

import contextlib
import math
import re
from collections import deque
from dataclasses import dataclass, field

from scripts.lib.engines.base import EngineMetrics

# Any ids of any vocabulary: what comes out doesn't matter, only that something does.
_PROBE_IDS = [1, 2, 3]


def generation_request(kind: str, served_model: str) -> tuple[str, dict]:
    """Path and JSON body of a request for one token, by our ids as in the run itself."""
    if kind == "llamacpp":
        return "/completion", {"prompt": _PROBE_IDS, "n_predict": 1, "cache_prompt": False}
    if kind == "sglang":
        return "/generate", {"input_ids": _PROBE_IDS, "sampling_params": {"max_new_tokens": 1}}
    return "/v1/completions", {"model": served_model, "prompt": _PROBE_IDS, "max_tokens": 1}


# Names of the Prometheus series, without the engine's prefix: the first one present counts. Older
# versions have other names. Read from the /metrics of llama.cpp b11549, SGLang 0.5.23, vLLM 0.32.
_SERIES = {
    "llamacpp": {
        "running": ["requests_processing"],
        "queued": ["requests_deferred"],
        "kv_usage": ["kv_cache_usage_ratio"],
        "generated": ["tokens_predicted_total"],
        # tokens_predicted_total moves only when an answer ends.
        "progress": ["n_decode_total", "prompt_tokens_total", "tokens_predicted_total"],
    },
    "sglang": {
        "running": ["num_running_reqs"],
        "queued": ["num_queue_reqs"],
        "kv_usage": ["token_usage"],
        "generated": ["generation_tokens_total"],
        "progress": [
            "generation_tokens_total",
            "realtime_tokens_total",
            "num_used_tokens",
            "token_usage",
            "gen_throughput",
            "num_running_reqs",
        ],
    },
    "vllm": {
        "running": ["num_requests_running"],
        "queued": ["num_requests_waiting"],
        "kv_usage": ["kv_cache_usage_perc", "gpu_cache_usage_perc"],
        "generated": ["generation_tokens_total"],
        "progress": ["generation_tokens_total", "prompt_tokens_total", "kv_cache_usage_perc", "num_requests_running"],
    },
}
_AVERAGED = {"kv_usage"}
_LINE = re.compile(r"^\w+:(?P<name>\w+)(?:\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)


def read_metrics(kind: str, text: str) -> tuple[EngineMetrics, tuple]:
    """Load of a server, and a mark that changes whenever it did some work, from its /metrics.

    A series that comes once per data-parallel rank is summed (a share is averaged).
    """
    values: dict[str, list[float]] = {}
    for line in _LINE.finditer(text):
        with contextlib.suppress(ValueError):
            number = float(line["value"])
            if math.isfinite(number):  # what was never measured is NaN
                values.setdefault(line["name"], []).append(number)
    wanted = _SERIES[kind]

    def value(field_name: str) -> float | None:
        for name in wanted[field_name]:
            if name in values:
                found = values[name]
                return sum(found) / len(found) if field_name in _AVERAGED else sum(found)
        return None

    def whole(field_name: str) -> int | None:
        number = value(field_name)
        return None if number is None else int(number)

    metrics = EngineMetrics(
        running=whole("running"), queued=whole("queued"), kv_usage=value("kv_usage"), generated=whole("generated")
    )
    return metrics, tuple(tuple(values.get(name, ())) for name in wanted["progress"])


@dataclass
class ProgressWatch:
    """Says when a server with requests has shown no progress for `limit` seconds."""

    limit: float
    since: float  # time of the last sign of life
    mark: tuple = ()

    def observe(self, now: float, metrics: EngineMetrics | None, mark: tuple = ()) -> bool:
        """Take a reading (None: the server did not answer). True when it looks hung: ask for a token to be sure."""
        if metrics is not None:
            idle = not metrics.running and not metrics.queued
            if idle or mark != self.mark:
                self.since = now
            self.mark = mark
        return now - self.since >= self.limit

    def alive(self, now: float) -> None:
        """The server has just generated a token."""
        self.since = now


@dataclass
class CrashBudget:
    """How often one server may be started again: `limit` times within an hour.

    A server that never worked is tried only once more: its command or its machine is at fault, and
    the reason should be seen soon.
    """

    limit: int
    window: float = 3600.0
    first_pause: float = 0.5
    longest_pause: float = 60.0
    _crashes: deque[float] = field(default_factory=deque)

    def crash(self, now: float, ever_ready: bool) -> float | None:
        """Count a crash. Returns the seconds to wait before the next start, None when there is none left."""
        while self._crashes and now - self._crashes[0] >= self.window:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > (self.limit if ever_ready else min(1, self.limit)):
            return None
        return min(self.longest_pause, self.first_pause * 2 ** (len(self._crashes) - 1))


@dataclass
class Linger:
    """How long servers stay up after the last lease: `seconds`, or not at all when asked to stop."""

    seconds: float
    free_since: float | None = None

    def over(self, now: float, leased: bool, stop_asked: bool) -> bool:
        """Take a look at the leases. True when the fleet is to end."""
        if leased:
            self.free_since = None
            return False
        if self.free_since is None:
            self.free_since = now
        return stop_asked or now - self.free_since >= self.seconds
