"""How long a server asks to wait, and what is tried again."""

import pytest

from scripts.lib.core.waiting import ATTEMPTS, LONGEST_SECONDS, Transient, again_when_transient, asked_to_wait

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "2"}, 2), ({"retry-after": " 1.5 "}, 1.5), ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30), ({"Retry-After": "Tue, 14 Nov 2023 22:00:00 GMT"}, 0),
        ({"Retry-After": "soon"}, None), ({}, None), ({"RateLimit": '"api";r=0;t=231'}, 231),
        ({"RateLimit": "limit=10, remaining=0, reset=7"}, 7), ({"RateLimit": "r=1"}, None),
        ({"Retry-After": "4", "RateLimit": '"api";r=0;t=231'}, 4),
    ],
)  # fmt: skip
def test_what_a_server_asks_for(headers, seconds):
    assert asked_to_wait(headers, NOW) == seconds


def failing(times, seconds=None):
    """An act that fails so often, then gives "done"."""
    failures = [Transient(ConnectionError(f"number {number}"), seconds) for number in range(times)]

    def act():
        if failures:
            raise failures.pop(0)
        return "done"

    return act


def test_it_is_tried_again_later_each_time():
    slept = []
    assert again_when_transient(failing(4), "it", slept.append) == "done"
    assert slept == [1, 2, 4, 8]


def test_the_servers_own_number_counts_where_it_is_longer(capsys):
    slept = []
    assert again_when_transient(failing(3, 6), "hf:o/few", slept.append) == "done"
    assert slept == [6, 6, 6]
    assert "hf:o/few: number 0: trying again in 0:06\n" in capsys.readouterr().err


def test_it_ends_with_the_last_cause():
    slept = []
    with pytest.raises(ConnectionError, match=f"number {ATTEMPTS - 1}"):
        again_when_transient(failing(ATTEMPTS), "it", slept.append)
    assert len(slept) == ATTEMPTS - 1


def test_nobody_waits_for_hours():
    with pytest.raises(ConnectionError, match="number 0"):
        again_when_transient(failing(1, LONGEST_SECONDS + 1), "it", pytest.fail)


def test_what_is_not_of_the_moment_is_raised_at_once():
    def act():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        again_when_transient(act, "it", pytest.fail)
