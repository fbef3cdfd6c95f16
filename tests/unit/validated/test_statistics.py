"""Sums, percentiles and frequencies are exact, over one shard or many."""

from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core.records import Sample, write_rows
from scripts.lib.validated.statistics import Statistics, add_up, write_token_frequencies
from tests.dialogues import converse, said, samples_of
from tests.families import target


def samples(name: str) -> list[Sample]:
    model = target(name)
    outputs = [said(name, model.encode("4."), model.encode("Simple.")), said(name, model.encode("6."))]
    return samples_of(converse(model, ["a", "b"], outputs))


def test_thoughts_are_counted_up_to_their_closing_tag():
    model = target("kimi-k2.5")
    counted = Statistics(model)
    for sample in samples("kimi-k2.5"):
        counted.add(sample)
    thought = len(model.encode("Simple.")) + 1
    assert counted.as_dict()["reasoning_tokens"] == thought + 1  # the second thought is empty
    assert counted.as_dict()["thinking_samples"] == 2


def test_a_thought_that_never_closed_counts_whole():
    model = target("kimi-k2.5")
    (sample,) = samples_of(converse(model, ["a"], [model.encode("Let me consider this")]))
    counted = Statistics(model)
    counted.add(sample)
    values = counted.as_dict()
    assert values["reasoning_tokens"] == values["supervised_tokens"] == len(model.encode("Let me consider this"))
    assert values["flags"] == {"reasoning_only": 1, "truncated": 1}


def test_merged_turns_are_one_sample_with_several_spans():
    model = target("llama-3.1")
    counted = Statistics(model)
    for sample in samples("llama-3.1"):
        counted.add(sample)
    values = counted.as_dict()
    assert (values["samples"], values["multi_turn_samples"], values["reasoning_tokens"]) == (1, 1, 0)
    assert values["outcomes"] == {"ok": 1}


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9) | st.just({}).map(dict)), max_size=4))
def test_adding_up_needs_no_order(parts: list[dict]):
    parts = [{key: value for key, value in part.items() if isinstance(value, int)} for part in parts]
    nested = [{"n": part, **part} for part in parts]
    assert add_up(nested) == add_up(reversed(nested))
    for key in "abc":
        assert add_up(nested).get(key, 0) == sum(part.get(key, 0) for part in parts)


def test_token_frequencies(tmp_path: Path):
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    rows = [("x", [1, 2, 2, 5], [0, 1, 0, 1]), ("y", [2, 7], [0, 1])]
    for path, (name, ids, mask) in zip(paths, rows):
        write_rows(path, Sample, [Sample(name, name, "d", ids, mask, "engine", "ok")], {})
    write_token_frequencies(tmp_path / "out.parquet", paths, 9, {})
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert table == {
        "token_id": list(range(9)),
        "count": [0, 1, 3, 0, 0, 1, 0, 1, 0],
        "supervised": [0, 0, 1, 0, 0, 1, 0, 1, 0],
    }


def test_frequencies_of_no_samples(tmp_path: Path):
    write_rows(tmp_path / "0.parquet", Sample, [], {})
    write_token_frequencies(tmp_path / "out.parquet", [tmp_path / "0.parquet"], 4, {})
    assert pq.read_table(tmp_path / "out.parquet")["count"].to_pylist() == [0, 0, 0, 0]
