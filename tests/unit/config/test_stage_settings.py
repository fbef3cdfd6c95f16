"""What a stage's result depends on, and what not."""

import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.stage_settings import stage_settings


def answers_depend_on(**engine: object) -> dict:
    values = {"model": {"name": "owner/model"}, "engine": engine, "datasets": {"d": {"class": "B", "source": "x"}}}
    return stage_settings(parse_config(values, "test"), "completions", "d")


@pytest.mark.parametrize("other", [{"kind": "vllm"}, {"served_model": "owner/model-finetuned"}])
def test_answers_of_another_engine_or_model_are_other_answers(other: dict) -> None:
    assert answers_depend_on(**{"kind": "sglang", **other}) != answers_depend_on(kind="sglang")


@pytest.mark.parametrize(
    "same", [{"served_model": "owner/model"}, {"endpoints": ["http://a:1"]}, {"launch": {"replicas": 2}}]
)
def test_answers_do_not_depend_on_where_they_are_made(same: dict) -> None:
    assert answers_depend_on(kind="sglang", **same) == answers_depend_on(kind="sglang")
