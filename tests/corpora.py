"""Small validated shards and corpora for tests: seeded, every sample different."""

import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core import records
from scripts.lib.core.records import Message, Sample
from scripts.lib.training.merge import merge

TARGET = {"name": "test", "revision": None, "tokenizer_hash": "t" * 16, "template_hash": "u" * 16, "vocab_size": 1000}


def sample(seed: int | str, dataset: str = "alpha", **changes) -> Sample:
    """A sample that depends on nothing but its arguments."""
    rng = random.Random(f"{seed} {dataset}")
    prompt, answer = rng.randint(2, 12), rng.randint(2, 30)
    prompt_id = f"{rng.getrandbits(128):032x}"
    values = {
        "id": prompt_id,
        "prompt_id": prompt_id,
        "dataset": dataset,
        "input_ids": [rng.randrange(1000) for _ in range(prompt + answer)],
        "loss_mask": [0] * prompt + [1] * answer,
        "ids_origin": "engine",
        "outcome": "ok",
        "messages": [
            Message("user", f"Question {seed}: où est «{rng.random()}»?"),
            Message("assistant", f"Answer {rng.random()}", reasoning="Let me think." if rng.random() < 0.5 else None),
        ],
    }
    return Sample(**(values | changes))


def shard(path: Path, samples: list[Sample], target: dict | None = None) -> Path:
    """Write a validated shard."""
    records.write_rows(path, Sample, samples, {"stage": "validated", "target": target or TARGET})
    return path


def shards(folder: Path, rows: int = 20, datasets: tuple[str, ...] = ("alpha", "beta"), per_dataset: int = 2):
    """Write `per_dataset` shards of `rows` samples for each dataset. Returns their paths."""
    return [
        shard(folder / dataset / f"{number:03d}.parquet", [sample(f"{number}/{row}", dataset) for row in range(rows)])
        for dataset in datasets
        for number in range(per_dataset)
    ]


def config(
    datasets: tuple[str, ...] = ("alpha", "beta"),
    weights: dict[str, float] | None = None,
    validation: dict | None = None,
    **merge_settings,
) -> Config:
    """A configuration that names these datasets."""
    sections = {name: {"class": "B", "source": "x", "weight": (weights or {}).get(name, 1.0)} for name in datasets}
    return parse_config({"datasets": sections, "merge": merge_settings, "validation": validation or {}}, "test")


def corpus(results: Path, settings: Config | None = None, paths: list[Path] | None = None, summary: dict | None = None):
    """Merge shards (made here when none are given) into `results`/training. Returns the manifest."""
    if paths is None:
        paths = shards(results / "validated")
    if summary is None:
        summary = summary_of(paths)
    return merge(settings or config(), paths, summary, results / "training", say=lambda line: None)


def summary_of(paths: list[Path]) -> dict:
    """The counts of summarize_validation for shards where every sample passed."""
    passed = Counter()
    for path in paths:
        if path.is_file() and path.stat().st_size > 100:
            passed.update(pq.read_table(path)["dataset"].to_pylist() if "dataset" in pq.read_schema(path).names else [])
    return {
        "datasets": {
            name: {
                "prompts": count,
                "outcomes": {"ok": count},
                "without_sample": {},
                "samples": count,
                "rejects": {},
                "passed": count,
            }
            for name, count in passed.items()
        }
    }


def rows_of(training: Path) -> list[Sample]:
    """All samples of a corpus, in its order."""
    return [
        records.from_dict(Sample, row)
        for path in sorted(training.glob("part-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def bytes_of(directory: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
