"""The card says of a corpus what is true of it, and nothing more."""

import pytest
import yaml

from scripts.lib.core import records
from scripts.lib.core.records import Sample
from scripts.lib.exports.card import ORIGINS, card
from tests.corpora import TARGET, config, corpus, sample, shard


def stages(dataset, sources, data_class="B", **completions):
    """What the shards of a dataset carry of the stages before them."""
    prompts = {"stage": "prompts", "sources": sources, "settings": {"dataset": {"data_class": data_class}}}
    answered = [{"stage": "completions", "dataset": dataset, **completions}] if completions else []
    return {"stage": "validated", "target": TARGET, "inputs": [{"stage": "tokens", "inputs": [prompts, *answered]}]}


def made(tmp_path, datasets, **settings):
    """A corpus of `{dataset: (samples, provenance)}`."""
    paths = []
    for name, (samples, provenance) in datasets.items():
        paths.append(tmp_path / "validated" / name / "000.parquet")
        records.write_rows(paths[-1], Sample, samples, provenance)
    return corpus(tmp_path, config(tuple(datasets), **settings), paths)


def row_of(text, dataset, column):
    """A cell of the tables, by dataset and heading."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| dataset") and column in cells:
            rows = (one.strip("|").split(" | ") for one in lines[at + 2 :])
            return next(row for row in rows if row[0].strip() == dataset)[cells.index(column)].strip()
    raise AssertionError(column)


def test_a_mixture_is_told_as_one(tmp_path):
    sampling = {"temperature": 0.7, "top_p": None, "seed": 0}
    engine = {"kind": "sglang", "version": "0.5.23", "launch": {"environment": "/home/me/.venvs/sglang"}}
    hub = {"name": "hf:owner/questions/train.parquet", "revision": "a" * 40, "license": "cc-by-4.0"}
    local = {"name": "/home/me/secret/kept.jsonl", "sha256": "b" * 64}
    hosted = {"name": "https://me:pw@host/x.csv?key=1", "ETag": "v1"}
    exact = [sample(n, "exact") for n in range(3)] + [sample(9, "exact", outcome="length", flags=["truncated"])]
    manifest = made(
        tmp_path,
        {
            "exact": (exact, stages("exact", [hub], settings={"sampling": sampling}, engine=engine)),
            "api": (
                [sample(1, "api", ids_origin="reconstructed")],
                stages("api", [hosted], settings={"sampling": sampling}, engine={"kind": "openai", "version": None}),
            ),
            "kept": (
                [sample(1, "kept", ids_origin="rendered", outcome="kept")],
                stages("kept", [local], "A"),
            ),
        },
    )
    text = card(manifest)
    assert f"- 4 samples, ids **engine**: {ORIGINS['engine']}" in text
    assert f"- 1 samples, ids **reconstructed**: {ORIGINS['reconstructed']}" in text
    assert f"- 1 samples, ids **rendered**: {ORIGINS['rendered']}" in text
    assert "as exact ids" not in text
    assert row_of(text, "exact", "cut at max_tokens") == "25.0%"
    assert [row_of(text, name, "ids") for name in ("exact", "api", "kept")] == ["engine", "reconstructed", "rendered"]
    assert [row_of(text, name, "class") for name in ("exact", "api", "kept")] == ["B", "B", "A"]
    assert row_of(text, "exact", "source") == "hf:owner/questions/train.parquet (revision aaaaaaaaaaaa)"
    assert row_of(text, "exact", "licence") == "cc-by-4.0"
    assert row_of(text, "kept", "licence") == "not recorded"
    assert row_of(text, "exact", "engine") == "sglang 0.5.23"
    assert row_of(text, "exact", "sampling") == "seed 0, temperature 0.7"
    assert row_of(text, "kept", "engine") == "-"
    assert row_of(text, "api", "source") == "https://host/x.csv (ETag v1)"
    assert row_of(text, "kept", "source") == "kept.jsonl (sha256 bbbbbbbbbbbb)"
    for private in ("/home/me", "pw", "key=1"):
        assert private not in text


def test_a_base_is_told(tmp_path):
    shard(tmp_path / "old/part.parquet", [sample(n, "old", ids_origin="given") for n in range(4)])
    paths = {"alpha": ([sample(1)], stages("alpha", []))}
    text = card(made(tmp_path, paths, base=str(tmp_path / "old")))
    assert row_of(text, "old", "from the base") == "4 read"
    assert row_of(text, "old", "source") == "merge.base"
    assert "- 4 samples, ids **given**" in text


@pytest.mark.parametrize(
    ("name", "base_model"),
    [("Qwen/Qwen3-8B", ["Qwen/Qwen3-8B"]), ("embedded:smollm2", None), ("/models/mine", None), ("x|y\n# z", None)],
)
def test_only_a_model_of_the_hub_is_named_to_the_hub(tmp_path, name, base_model):
    path = tmp_path / "validated/alpha/000.parquet"
    manifest = corpus(tmp_path, config(("alpha",)), [shard(path, [sample(1)], TARGET | {"name": name})])
    front, body = card(manifest).removeprefix("---\n").split("\n---\n")
    assert yaml.safe_load(front).get("base_model") == base_model
    assert body.count("\n# ") == 1
