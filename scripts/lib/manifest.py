"""manifest.json: what a corpus holds, where every part of it came from, and whether it is still whole."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.lib import durable, records, shuffle
from scripts.lib.errors import UserError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(slots=True)
class Part:
    """One Parquet file of the corpus."""

    file: str
    sha256: str
    bytes: int
    samples: int
    tokens: int
    supervised_tokens: int


@dataclass(slots=True)
class Input:
    """One file that was merged: a validated shard, or a file of the base corpus."""

    name: str  # {dataset}/{shard}.parquet
    kind: str  # base | shard
    sha256: str
    samples: int
    provenance: str  # key into Manifest.provenance


@dataclass(slots=True)
class Manifest:
    """The ledger of one corpus version. Holds no time and no absolute path: equal inputs, equal bytes.

    `datasets[name]` adds up: `read` = `samples` + the sum of `dropped`; `funnel` holds what the
    stages before counted, from source rows to the samples read here.
    """

    version: str
    samples: int
    tokens: int
    supervised_tokens: int
    parts: list[Part]
    datasets: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    target: dict[str, str]
    inputs: list[Input]
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `directory`/manifest.json durably."""
    durable.write_json(directory / MANIFEST, dataclasses.asdict(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read `directory`/manifest.json. Raises UserError when it is missing, broken or of a newer schema."""
    path = directory / MANIFEST
    values = durable.read_json(path)
    found = values.get("schema_version") if isinstance(values, dict) else None
    if found != SCHEMA_VERSION:
        raise UserError(f"{path}: has schema version {found}, this code reads {SCHEMA_VERSION}")
    try:
        manifest = Manifest(**values)
        manifest.parts = [Part(**part) for part in values["parts"]]
        manifest.inputs = [Input(**one) for one in values["inputs"]]
    except TypeError as error:
        raise UserError(f"{path}: not a manifest of ours ({error})") from None
    return manifest


def files_of(manifest: Manifest) -> list[str]:
    """Names of all files of a corpus folder, the manifest last: it exists only when the parts do."""
    return [part.file for part in manifest.parts] + [MANIFEST]


def part_damage(path: Path, part: Part) -> str | None:
    """What is wrong with the bytes of one part, None when they are those that the manifest tells."""
    try:
        size = path.stat().st_size
        if size != part.bytes:
            return f"{path}: has {size} bytes, the manifest says {part.bytes}"
        if durable.sha256_file(path) != part.sha256:
            return f"{path}: its sha256 differs from the manifest's"
    except OSError as error:
        return f"{path}: {error.strerror.lower() if error.strerror else error}"
    return None


def damaged_parts(directory: Path, manifest: Manifest) -> list[str]:
    """One line for each part whose bytes are not those that the manifest tells. Reads every byte."""
    found = [part_damage(directory / part.file, part) for part in manifest.parts]
    return [problem for problem in found if problem]


def require_whole(directory: Path) -> Manifest:
    """Read the manifest and check every byte. Raises UserError naming the first damaged part."""
    manifest = read_manifest(directory)
    problems = damaged_parts(directory, manifest)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"{problems[0]}{more}: the corpus is damaged: bring a backup back with restore_training, "
            "or remove that folder and merge again"
        )
    return manifest


def verify(directory: Path) -> tuple[Manifest, list[str]]:
    """Check a corpus against its manifest, bytes and rows. Returns the manifest and the problems found.

    Checked: sha256 of every part; lengths, masks and ids of every sample; no id twice; order of the
    seeded shuffle; counts of samples and tokens per part, per dataset and in all; that the ledger
    adds up; that no stray part lies in the folder. Memory holds one row group.
    """
    manifest = read_manifest(directory)
    problems = damaged_parts(directory, manifest)
    stray = {path.name for path in directory.glob("*.parquet")} - {part.file for part in manifest.parts}
    problems += [f"{directory / name}: is not in the manifest" for name in sorted(stray)]
    if problems:
        return manifest, problems

    seen: dict[str, list[int]] = {}
    last = (-1, "")
    for part in manifest.parts:
        path = directory / part.file
        samples = tokens = supervised = 0
        for table in _row_groups(path):
            lengths, sums, trouble = check_rows(table)
            problems += [f"{path}:{samples + row}: {text}" for row, text in trouble]
            keys = shuffle.order_keys(table["id"], manifest.settings["merge"]["seed"])
            order = [*zip(keys.tolist(), table["id"].to_pylist())]
            for row, (before, this) in enumerate(zip([last, *order], order)):
                if this == before:
                    problems.append(f"{path}:{samples + row}: id {this[1]} is there twice")
                elif this < before:
                    problems.append(f"{path}:{samples + row}: id {this[1]} is out of the shuffle's order")
            last = order[-1] if order else last
            for name, *counts in per_dataset(table, lengths, sums):
                total = seen.setdefault(name, [0, 0, 0])
                seen[name] = [a + b for a, b in zip(total, counts)]
            samples, tokens, supervised = (
                samples + len(table),
                tokens + int(lengths.sum()),
                supervised + int(sums.sum()),
            )
        problems += _unequal(str(path), (samples, tokens, supervised), part)
    problems += _check_ledger(directory / MANIFEST, manifest, seen)
    return manifest, problems


def _row_groups(path: Path) -> Iterator[pa.Table]:
    with records.open_parquet(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, use_threads=True).combine_chunks()


def check_rows(table: pa.Table | pa.RecordBatch) -> tuple[np.ndarray, np.ndarray, list[tuple[int, str]]]:
    """Tokens and supervised tokens of each row, and `(row, problem)` for each row that is no sample."""
    lengths = pc.list_value_length(table["input_ids"]).to_numpy(zero_copy_only=False).astype(np.int64)
    mask_lengths = pc.list_value_length(table["loss_mask"]).to_numpy(zero_copy_only=False).astype(np.int64)
    ids = pc.list_flatten(table["input_ids"]).to_numpy(zero_copy_only=False)
    mask = pc.list_flatten(table["loss_mask"]).to_numpy(zero_copy_only=False)
    sums = row_sums(mask, mask_lengths)
    trouble = [(int(row), "has no tokens") for row in np.flatnonzero(lengths == 0)]
    trouble += [
        (int(row), f"has {lengths[row]} ids but {mask_lengths[row]} mask values")
        for row in np.flatnonzero(lengths != mask_lengths)
    ]
    trouble += [
        (_row_of(at, mask_lengths), f"has the mask value {mask[at]}, only 0 and 1 are known")
        for at in np.flatnonzero((mask != 0) & (mask != 1))[:1]
    ]
    trouble += [(_row_of(at, lengths), f"has the negative token id {ids[at]}") for at in np.flatnonzero(ids < 0)[:1]]
    return lengths, sums, trouble


def row_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of `values` over consecutive stretches of the given lengths (int64); 0 for an empty stretch."""
    ends = np.cumsum(lengths)
    running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return running[ends] - running[ends - lengths]


def _row_of(position: int, lengths: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def per_dataset(
    table: pa.Table | pa.RecordBatch, lengths: np.ndarray, sums: np.ndarray
) -> Iterator[tuple[str, int, int, int]]:
    """`(dataset, samples, tokens, supervised tokens)` for each dataset in these rows."""
    counts = (
        pa.table({"dataset": table["dataset"], "tokens": lengths, "supervised": sums})
        .group_by("dataset")
        .aggregate([([], "count_all"), ("tokens", "sum"), ("supervised", "sum")])
    )
    for row in counts.to_pylist():
        yield row["dataset"], row["count_all"], row["tokens_sum"], row["supervised_sum"]


def _unequal(where: str, found: tuple[int, int, int], recorded: Any) -> list[str]:
    names = ("samples", "tokens", "supervised_tokens")
    told = [recorded[name] if isinstance(recorded, dict) else getattr(recorded, name) for name in names]
    return [
        f"{where}: holds {have} {name.replace('_', ' ')}, the manifest says {said}"
        for name, have, said in zip(names, found, told)
        if have != said
    ]


def _check_ledger(path: Path, manifest: Manifest, seen: dict[str, list[int]]) -> list[str]:
    problems = []
    for name, counts in seen.items():
        if name not in manifest.datasets:
            problems.append(f"{path}: dataset {name} is in the parts but not in the manifest")
        else:
            problems += _unequal(f"{path}: dataset {name}", tuple(counts), manifest.datasets[name])
    for name, entry in manifest.datasets.items():
        if name not in seen and entry["samples"]:
            problems.append(f"{path}: dataset {name} is in the manifest but not in the parts")
        if entry["read"] != entry["samples"] + sum(entry["dropped"].values()):
            problems.append(f"{path}: dataset {name}: samples and dropped don't add up to the {entry['read']} read")
    totals = tuple(sum(counts[i] for counts in seen.values()) for i in range(3))
    problems += _unequal(str(path), totals, manifest)
    read = sum(one.samples for one in manifest.inputs)
    if read != sum(entry["read"] for entry in manifest.datasets.values()):
        problems.append(f"{path}: the inputs hold {read} samples, the datasets' counts say otherwise")
    return problems
