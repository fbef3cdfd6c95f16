"""Readings of a server's load."""

from pathlib import Path

import pytest

from scripts.lib.engines import ENGINES
from scripts.lib.engines.metrics import EngineMetrics, read_metrics

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
    assert read_metrics(ENGINES["llamacpp"].metrics, LLAMACPP)[0] == EngineMetrics(3, 2, None, 41)
    assert read_metrics(ENGINES["sglang"].metrics, SGLANG)[0] == EngineMetrics(12, 4, 0.5, 1500)
    assert read_metrics(ENGINES["vllm"].metrics, VLLM)[0] == EngineMetrics(2, 1, 0.125, 99)
    assert read_metrics(ENGINES["vllm"].metrics, "")[0] == EngineMetrics()


@pytest.mark.parametrize("value", ["NaN", "Inf", "-Inf", "1e400", "many"])
def test_a_load_that_is_no_number_is_not_told(value):
    text = f"llamacpp:requests_processing {value}\nllamacpp:requests_deferred 2\n"
    assert read_metrics(ENGINES["llamacpp"].metrics, text)[0] == EngineMetrics(None, 2, None, None)


def test_metrics_of_a_real_vllm() -> None:
    """Recorded while it answered three requests: labels of reasons, and counters' `_created` beside their totals."""
    recorded = (Path(__file__).parent / "replies" / "vllm_metrics.txt").read_text()
    assert read_metrics(ENGINES["vllm"].metrics, recorded)[0] == EngineMetrics(3, 0, 0.004126547455295726, 170)


def test_mark_changes_with_work_only() -> None:
    mark = read_metrics(ENGINES["llamacpp"].metrics, LLAMACPP)[1]
    assert (
        read_metrics(ENGINES["llamacpp"].metrics, LLAMACPP.replace("requests_deferred 2", "requests_deferred 9"))[1]
        == mark
    )
    assert (
        read_metrics(ENGINES["llamacpp"].metrics, LLAMACPP.replace("n_decode_total 12", "n_decode_total 13"))[1] != mark
    )
    assert (
        read_metrics(ENGINES["sglang"].metrics, SGLANG.replace("0.75", "0.76"))[1]
        != read_metrics(ENGINES["sglang"].metrics, SGLANG)[1]
    )
