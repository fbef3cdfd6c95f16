"""Types that every engine adapter shares."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class EngineMetrics:
    """What a server says about its load. None: this engine (or version) does not tell."""

    running: int | None = None  # requests being decoded
    queued: int | None = None  # requests that wait for a slot
    kv_usage: float | None = None  # share of the key-value cache in use, 0 to 1
    generated: int | None = None  # tokens generated since the server started
