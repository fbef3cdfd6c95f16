"""How long a server asks to be left alone, and doing a thing again when it failed for a while."""

import email.utils
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from scripts.lib.core.units import duration

ATTEMPTS = 6
BACKOFF_SECONDS = 1.0  # before the second attempt; doubled each time
LONGEST_SECONDS = 330.0  # the Hub counts in windows of five minutes
TOLD_SECONDS = 5.0  # a longer wait is told
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})  # what may be over in a while

Result = TypeVar("Result")
_RESET = re.compile(r"(?:^|[;,\s])(?:t|reset)=(\d+)")


class Transient(Exception):
    """What failed may work in a while; `cause` is what is raised in the end. `seconds`: how long was asked for."""

    def __init__(self, cause: Exception, seconds: float | None = None):
        super().__init__(str(cause))
        self.cause = cause
        self.seconds = seconds


def asked_to_wait(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds by Retry-After (a number or a date) or the reset of RateLimit; None when the server says nothing."""
    lower = {name.lower(): value.strip() for name, value in headers.items()}
    value = lower.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    date = email.utils.parsedate_tz(value)
    if date is not None:
        return max(0.0, email.utils.mktime_tz(date) - now)
    reset = _RESET.search(lower.get("ratelimit", ""))
    return float(reset[1]) if reset else None


def again_when_transient(act: Callable[[], Result], what: str, sleep: Callable[[float], None] | None = None) -> Result:
    """What `act` returns. Where it raises Transient it is called again, ATTEMPTS times in all, each time later.

    Raises the cause of the last one; at once when the server asks to wait longer than LONGEST_SECONDS.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return act()
        except Transient as transient:
            pause = max(BACKOFF_SECONDS * 2 ** (attempt - 1), transient.seconds or 0.0)
            if attempt == ATTEMPTS or pause > LONGEST_SECONDS:
                raise transient.cause from None
            if pause >= TOLD_SECONDS:
                print(f"{what}: {transient}: trying again in {duration(pause / 3600)}", file=sys.stderr, flush=True)
            (sleep or time.sleep)(pause)
    raise AssertionError("unreachable")
