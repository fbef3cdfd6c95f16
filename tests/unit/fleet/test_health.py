"""Readings of a server's load, and the clocks that decide about it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.engines.base import EngineMetrics
from scripts.lib.fleet.health import CrashBudget, Linger, ProgressWatch, read_metrics

LLAMACPP = """\
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 41
llamacpp:n_decode_total 12
llamacpp:requests_processing 3
llamacpp:requests_deferred 2
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 7.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",dp_rank="1"} 5.0
sglang:num_queue_reqs{dp_rank="0"} 0.0
sglang:num_queue_reqs{dp_rank="1"} 4.0
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 0.75
sglang:generation_tokens_total{model_name="m"} 1.5e+03
python_info{version="3.11"} 1.0
"""
VLLM = """\
vllm:num_requests_running{engine="0",model_name="a,b{c}"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.125
vllm:generation_tokens_total{engine="0"} 99.0
vllm:generation_tokens_created{engine="0"} 1.7e+09
"""


def test_metrics_of_each_engine() -> None:
    assert read_metrics("llamacpp", LLAMACPP)[0] == EngineMetrics(3, 2, None, 41)
    assert read_metrics("sglang", SGLANG)[0] == EngineMetrics(12, 4, 0.5, 1500)
    assert read_metrics("vllm", VLLM)[0] == EngineMetrics(2, 1, 0.125, 99)
    assert read_metrics("vllm", "")[0] == EngineMetrics()


@pytest.mark.parametrize("value", ["NaN", "Inf", "-Inf", "1e400", "many"])
def test_a_load_that_is_no_number_is_not_told(value):
    text = f"llamacpp:requests_processing {value}\nllamacpp:requests_deferred 2\n"
    assert read_metrics("llamacpp", text)[0] == EngineMetrics(None, 2, None, None)


def test_metrics_of_a_real_vllm() -> None:
    """Recorded while it answered three requests: labels of reasons, and counters' `_created` beside their totals."""
    recorded = (Path(__file__).parents[1] / "engines" / "replies" / "vllm_metrics.txt").read_text()
    assert read_metrics("vllm", recorded)[0] == EngineMetrics(3, 0, 0.004126547455295726, 170)


def test_mark_changes_with_work_only() -> None:
    mark = read_metrics("llamacpp", LLAMACPP)[1]
    assert read_metrics("llamacpp", LLAMACPP.replace("requests_deferred 2", "requests_deferred 9"))[1] == mark
    assert read_metrics("llamacpp", LLAMACPP.replace("n_decode_total 12", "n_decode_total 13"))[1] != mark
    assert read_metrics("sglang", SGLANG.replace("0.75", "0.76"))[1] != read_metrics("sglang", SGLANG)[1]


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
