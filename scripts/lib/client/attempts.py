"""How often a piece of work has been tried, and what one more failure means for it. Pure rules, no IO."""

import random
from dataclasses import dataclass
from typing import NamedTuple

from scripts.lib.config.model import Transport
from scripts.lib.engines.base import Failure

# Times that a stale connection may cost nothing.
_FREE = 3


class GivenUp(NamedTuple):
    """The failure that ends a piece of work."""

    outcome: str
    reason: str
    refused: bool = False  # by the endpoint, at once


@dataclass(slots=True)
class Attempts:
    """The tries of one prompt (or row) so far."""

    counted: int = 0  # failures that count against it
    deterministic: int = 0  # of these, failures that are likely to come again
    pauses: int = 0  # backoffs in a row
    stale: int = 0  # stale connections in a row
    successes_seen: int = -1  # the pool's successes at the last failure
    avoid: str | None = None  # endpoint that failed last
    repeats: int = 0  # sends that had to be made again

    def answered(self) -> None:
        """There was an answer, if not the last one."""
        self.pauses = self.stale = 0

    def failed(self, failure: Failure, successes: int, settings: Transport, jitter: random.Random) -> float | GivenUp:
        """Seconds until the next try after a failure that isn't fatal, or why there is none.

        `successes` counts what the servers answered: a failure counts only when something was answered since the
        last one here, so that servers which fail everything don't burn through the work.
        """
        if failure.kind == "permanent":
            return GivenUp(failure.outcome, failure.reason, refused=True)
        if failure.kind == "free" and self.stale < _FREE:
            self.stale += 1
            return 0.0
        if failure.kind in ("retry", "free") and successes != self.successes_seen:
            self.successes_seen = successes
            self.counted += 1
            # Only failures of this kind: others before it say nothing about the prompt.
            self.deterministic += failure.most_attempts is not None
            if failure.most_attempts is not None and self.deterministic >= failure.most_attempts:
                return GivenUp(failure.outcome, failure.reason)
            if self.counted >= settings.attempts:
                return GivenUp("exhausted", f"{self.counted} attempts, the last: {failure.reason}")
        self.repeats += 1
        delay = backoff(self.pauses, settings.backoff_first, settings.backoff_cap, jitter)
        self.pauses += 1
        return max(delay, failure.retry_after or 0.0)


def backoff(pauses: int, first: float, cap: float, jitter: random.Random) -> float:
    """Seconds to wait before try number `pauses` + 2: exponential with full jitter."""
    return jitter.uniform(0.0, min(cap, first * 2.0 ** min(pauses, 30)))
