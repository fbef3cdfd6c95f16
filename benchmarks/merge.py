"""Merge against a plain read-and-rewrite of the same Parquet files: time and peak memory, side by side.

python -m benchmarks.merge --samples 200000 --folder /scratch

Base corpus and new shards are generated (seeded; token counts and texts as long as real answers), a
tenth of the base is superseded. Each contender runs in its own process, in turns; CPU time and
peak memory are the kernel's counts for that process (on a busy machine, compare CPU times).
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.lib.config.file import parse_config
from scripts.lib.core import records
from scripts.lib.training.merge import merge

VOCABULARY = 151_936
GROUP = 1024


def generate(folder: Path, samples: int, mean_tokens: int, seed: int) -> tuple[list[Path], int]:
    """Write a base corpus (four fifths) and shards (the rest). Returns the shards and all tokens written."""
    rng = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 10))) for _ in range(20_000)]
    base, new = samples * 4 // 5, samples - samples * 4 // 5
    plan = [("base", first, min(20_000, base - first)) for first in range(0, base, 20_000)]
    # The first half of the new samples (a tenth of the base's number) has ids that the base holds too.
    starts = range(0, new, 5_000)
    plan += [("new", base - new // 2 + first, min(5_000, new - first)) for first in starts]
    shards, total = [], 0
    schema = records.with_provenance(records.SAMPLE_SCHEMA, {"stage": "validated"})
    for number, (dataset, first, count) in enumerate(plan):
        path = folder / dataset / f"{number:04d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for start in range(first, first + count, GROUP):
                group = _group(rng, words, dataset, start, min(GROUP, first + count - start), mean_tokens)
                total += len(group["input_ids"].combine_chunks().values)
                writer.write_table(group.cast(schema))
        if dataset == "new":
            shards.append(path)
    return shards, total


def _group(
    rng: np.random.Generator, words: list[str], dataset: str, first: int, count: int, mean_tokens: int
) -> pa.Table:
    lengths = np.clip(rng.gamma(2.0, mean_tokens / 2, count).astype(np.int64), 16, None)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    ids = (rng.zipf(1.2, ends[-1]) % VOCABULARY).astype(np.int32)
    mask = np.ones(ends[-1], np.int8)
    for start, length in zip(ends[:-1], lengths):
        mask[start : start + length // 8] = 0
    # Three quarters of a word per token, as in English prose.
    text = [" ".join(words[i] for i in rng.integers(0, len(words), length * 3 // 4)) for length in lengths]
    messages = [
        [
            {"role": "user", "content": one[: len(one) // 8], "trainable": True},
            {"role": "assistant", "content": one[len(one) // 8 :], "trainable": True},
        ]
        for one in text
    ]
    names = [f"{number * 2654435761 % 2**32:032x}" for number in range(first, first + count)]
    offsets = pa.array(ends, pa.int32())
    return pa.Table.from_arrays(
        [
            pa.array(names),
            pa.array(names),
            pa.repeat(dataset, count),
            pa.ListArray.from_arrays(offsets, ids, type=records.SAMPLE_SCHEMA.field("input_ids").type),
            pa.ListArray.from_arrays(offsets, mask, type=records.SAMPLE_SCHEMA.field("loss_mask").type),
            pa.repeat("engine", count),
            pa.repeat("ok", count),
            pa.array(messages, records.SAMPLE_SCHEMA.field("messages").type),
            pa.nulls(count, pa.string()),
            pa.array([[]] * count, records.SAMPLE_SCHEMA.field("flags").type),
            pa.nulls(count, pa.string()),
        ],
        schema=records.SAMPLE_SCHEMA,
    )


def rewrite(files: list[Path], output: Path) -> None:
    """The plain contender: read each row group, write it again with the same settings."""
    with pq.ParquetWriter(output, records.SAMPLE_SCHEMA, compression="zstd") as writer:
        for path in files:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group).cast(records.SAMPLE_SCHEMA))
    with open(output, "rb") as file:
        os.fsync(file.fileno())


def measured(work: Callable[[], object]) -> tuple[float, float, float]:
    """Run `work` in a child process. Returns its seconds, its CPU seconds and its peak memory in GB."""
    sys.stdout.flush()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit("a contender failed, see above")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.merge", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=50_000, help="samples in all (default 50000)")
    parser.add_argument("--mean-tokens", type=int, default=2_000, help="mean tokens of a sample (default 2000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        made: list = []

        # In a child too: a forked contender would inherit this memory.
        def make() -> None:
            shards, tokens = generate(folder, options.samples, options.mean_tokens, seed=0)
            (folder / "plan").write_text("\n".join([str(tokens), *map(str, shards)]))

        measured(make)
        tokens, *made = (folder / "plan").read_text().splitlines()
        shards = [Path(line) for line in made]
        files = sorted((folder / "base").glob("*.parquet")) + shards
        size = sum(path.stat().st_size for path in files)
        print(f"{options.samples} samples, {int(tokens) / 1e6:.0f}M tokens, {size / 1e9:.2f} GB of Parquet")
        config = parse_config(
            {"datasets": {"new": {"class": "B", "source": "x"}}, "merge": {"base": str(folder / "base")}}, "benchmark"
        )
        new = options.samples - options.samples * 4 // 5
        counts = {"prompts": new, "outcomes": {"ok": new}, "without_sample": {}, "rejects": {}}
        summary = {"datasets": {"new": {**counts, "samples": new, "passed": new}}}
        plain, merged = [], []
        for _ in range(options.rounds):
            plain.append(measured(lambda: rewrite(files, folder / "plain.parquet")))
            (folder / "plain.parquet").unlink()
            merged.append(
                measured(lambda: merge(config, shards, summary, folder / "out" / "training", lambda line: None))
            )
            shutil.rmtree(folder / "out")
        for label, runs in (("read and rewrite", plain), ("merge", merged)):
            seconds, cpu = (statistics.median(run[at] for run in runs) for at in (0, 1))
            spread = f"{min(run[0] for run in runs):.1f} to {max(run[0] for run in runs):.1f}"
            peak = max(run[2] for run in runs)
            rate = int(tokens) / 1e6 / seconds
            print(
                f"{label:17} {seconds:7.1f} s ({spread})  {cpu:6.1f} s CPU  {rate:6.1f}M tokens/s  peak {peak:.2f} GB"
            )
        ratio = statistics.median(run[0] for run in plain) / statistics.median(run[0] for run in merged)
        print(f"merge reaches {ratio:.2f} of the speed of the plain rewrite")


if __name__ == "__main__":
    main()
