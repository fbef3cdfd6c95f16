"""The clocks that decide about servers."""

from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.engines.metrics import EngineMetrics
from scripts.lib.fleet.health import CrashBudget, Linger, ProgressWatch


def test_server_without_progress_looks_hung_only_while_it_has_requests() -> None:
    busy, idle = EngineMetrics(running=1, queued=0), EngineMetrics(running=0, queued=0)
    watch = ProgressWatch(limit=10, since=0)
    assert not watch.observe(1, busy, (1,))
    assert not watch.observe(10, busy, (2,))
    assert not watch.observe(19, busy, (2,))
    assert watch.observe(20, busy, (2,))
    watch.alive(20)
    assert not watch.observe(29, busy, (2,))
    assert not watch.observe(100, idle, (2,))
    assert not watch.observe(109, EngineMetrics(running=0, queued=5), (2,))
    assert watch.observe(110, EngineMetrics(running=0, queued=5), (2,))


def test_server_that_does_not_answer_looks_hung() -> None:
    watch = ProgressWatch(limit=10, since=0)
    assert not watch.observe(9, None)
    assert watch.observe(10, None)


def test_crash_budget_counts_the_last_hour() -> None:
    budget = CrashBudget(limit=2)
    assert budget.crash(0, True) == 0.5
    assert budget.crash(10, True) == 1.0
    assert budget.crash(3600, True) == 1.0  # the crash at 0 is forgiven
    assert budget.crash(3601, True) is None


def test_server_that_never_worked_is_tried_twice() -> None:
    budget = CrashBudget(limit=5)
    assert budget.crash(0, False) == 0.5
    assert budget.crash(1, False) is None
    assert CrashBudget(limit=0).crash(0, False) is None


def test_server_whose_siblings_work_has_the_whole_budget_and_longer_pauses() -> None:
    """What eight starts at once do to each other (caches, ports, memory) passes; a GPU is dear."""
    budget = CrashBudget(limit=5)
    assert [budget.crash(now, False, others_work=True) for now in range(6)] == [5, 10, 20, 40, 60, None]
    assert CrashBudget(limit=5).crash(0, True, others_work=True) == 0.5


@given(st.lists(st.floats(min_value=0, max_value=30), min_size=1, max_size=40))
def test_pauses_grow_up_to_the_longest(steps: list[float]) -> None:
    budget, now, pauses = CrashBudget(limit=1000), 0.0, []
    for step in steps:
        now += step
        pauses.append(budget.crash(now, True))
    assert pauses == sorted(pauses)
    assert pauses[-1] <= budget.longest_pause


def test_linger_starts_anew_with_each_lease() -> None:
    linger = Linger(15)
    assert not linger.over(0, leased=True, stop_asked=False)
    assert not linger.over(1, leased=False, stop_asked=False)
    assert not linger.over(15.9, leased=False, stop_asked=False)
    assert not linger.over(16, leased=True, stop_asked=True)
    assert not linger.over(17, leased=False, stop_asked=False)
    assert linger.over(32, leased=False, stop_asked=False)


def test_asked_to_stop_does_not_linger_but_waits_for_leases() -> None:
    linger = Linger(15)
    assert not linger.over(0, leased=True, stop_asked=True)
    assert linger.over(1, leased=False, stop_asked=True)
