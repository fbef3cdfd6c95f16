"""Numbers as people read them."""

import pytest

from scripts.lib.core.units import duration, short


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (4752, "4.8k"), (999_960, "1.0M"), (5.2e8, "520.0M"), (2e9, "2.0G")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(("hours", "text"), [(None, "?"), (0.0, "0:00"), (38 / 3600, "0:38"), (15.56, "15:33:36")])
def test_durations(hours: float | None, text: str) -> None:
    assert duration(hours) == text
