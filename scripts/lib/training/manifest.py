"""manifest.json: what a corpus holds, where every part of it came from, and whether it is still whole."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.lib.core import durable, records
from scripts.lib.core.errors import UserError
from scripts.lib.training import shuffle
from scripts.lib.validated import funnel

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
COUNTED = ("rows", "tokens", "supervised_tokens")


@dataclass(slots=True)
class Part:
    """One Parquet file of the corpus."""

    file: str
    sha256: str
    bytes: int
    rows: int
    tokens: int
    supervised_tokens: int


@dataclass(slots=True)
class Input:
    """One file that was merged: a validated shard, or a file of the base corpus."""

    name: str  # {dataset}/{shard}.parquet
    kind: str  # base | shard
    sha256: str
    rows: int
    provenance: str  # key into Manifest.provenance


@dataclass(slots=True)
class Manifest:
    """The ledger of one corpus version. Holds no time and no absolute path: equal inputs, equal bytes.

    `datasets[name]` adds up: `read` = `rows` + the sum of `dropped`; its `funnel` tells what the stages
    before counted, and ends with the `passed` samples that were read from shards here.
    """

    version: str
    totals: dict[str, int]  # rows, tokens, supervised_tokens
    parts: list[Part]
    datasets: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    target: dict[str, Any]  # what the ids depend on, `Target.provenance()`; {} when no input tells it
    inputs: list[Input]
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `directory`/manifest.json durably."""
    durable.write_json(directory / MANIFEST, asdict(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read `directory`/manifest.json. Raises UserError when it is missing, broken or of a newer schema."""
    path = directory / MANIFEST
    values = durable.read_json(path)
    found = values.get("schema_version")
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

    seen: dict[str, Counter] = {}
    vocab_size = manifest.target.get("vocab_size")
    last = (-1, "")
    for part in manifest.parts:
        path = directory / part.file
        found = Counter()
        for table in _row_groups(path):
            lengths, sums = token_counts(table)
            problems += [f"{path}:{found['rows'] + row}: {text}" for row, text in row_problems(table, vocab_size)]
            keys = shuffle.order_keys(table["id"], manifest.settings["merge"]["seed"])
            order = [*zip(keys.tolist(), table["id"].to_pylist())]
            for row, (before, this) in enumerate(zip([last, *order], order)):
                if this == before:
                    problems.append(f"{path}:{found['rows'] + row}: id {this[1]} is there twice")
                elif this < before:
                    problems.append(f"{path}:{found['rows'] + row}: id {this[1]} is out of the shuffle's order")
            last = order[-1] if order else last
            for name, counts in per_dataset(table, lengths, sums):
                seen.setdefault(name, Counter()).update(counts)
                found.update(counts)
        problems += _unequal(str(path), found, asdict(part))
    problems += _check_ledger(directory / MANIFEST, manifest, seen)
    return manifest, problems


def _row_groups(path: Path) -> Iterator[pa.Table]:
    with records.open_parquet(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, use_threads=True).combine_chunks()


def token_counts(rows: pa.Table | pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and supervised tokens of each row, int64."""
    lengths = pc.list_value_length(rows["input_ids"]).to_numpy(zero_copy_only=False).astype(np.int64)
    mask_lengths = pc.list_value_length(rows["loss_mask"]).to_numpy(zero_copy_only=False).astype(np.int64)
    mask = pc.list_flatten(rows["loss_mask"]).to_numpy(zero_copy_only=False)
    sums = np.zeros(len(lengths), np.int64)
    filled = mask_lengths > 0  # reduceat gives a neighbour's value for an empty stretch
    if filled.any():
        starts = (np.cumsum(mask_lengths) - mask_lengths)[filled]
        sums[filled] = np.add.reduceat(mask, starts, dtype=np.int64)
    return lengths, sums


def row_problems(rows: pa.Table | pa.RecordBatch, vocab_size: int | None) -> list[tuple[int, str]]:
    """`(row, problem)` for rows that are no samples; of bad values only the first is named.

    Ids must lie in [0, vocab_size); None when the vocabulary is not known.
    """
    vocab_size = vocab_size or np.iinfo(np.int32).max
    lengths = pc.list_value_length(rows["input_ids"]).to_numpy(zero_copy_only=False)
    mask_lengths = pc.list_value_length(rows["loss_mask"]).to_numpy(zero_copy_only=False)
    ids = pc.list_flatten(rows["input_ids"]).to_numpy(zero_copy_only=False)
    mask = pc.list_flatten(rows["loss_mask"]).to_numpy(zero_copy_only=False)
    problems = [(int(row), "has no tokens") for row in np.flatnonzero(lengths == 0)]
    problems += [
        (int(row), f"has {lengths[row]} ids but {mask_lengths[row]} mask values")
        for row in np.flatnonzero(lengths != mask_lengths)
    ]
    for values, row_lengths, limit, text in (
        (mask, mask_lengths, 2, "has the mask value {}, only 0 and 1 are known"),
        (ids, lengths, vocab_size, f"has the token id {{}}, outside of 0 to {vocab_size - 1}"),
    ):
        if len(values) and (values.min() < 0 or values.max() >= limit):
            at = int(((values < 0) | (values >= limit)).argmax())
            row = int(np.searchsorted(np.cumsum(row_lengths), at, side="right"))
            problems.append((row, text.format(values[at])))
    return problems


def per_dataset(
    rows: pa.Table | pa.RecordBatch, lengths: np.ndarray, sums: np.ndarray
) -> Iterator[tuple[str, dict[str, int]]]:
    """`(dataset, {rows, tokens, supervised_tokens})` for each dataset in these rows."""
    counts = (
        pa.table({"dataset": rows["dataset"], "tokens": lengths, "supervised": sums})
        .group_by("dataset")
        .aggregate([([], "count_all"), ("tokens", "sum"), ("supervised", "sum")])
    )
    for row in counts.to_pylist():
        sizes = (row["count_all"], row["tokens_sum"], row["supervised_sum"])
        yield row["dataset"], dict(zip(COUNTED, sizes))


def _unequal(where: str, found: dict[str, int], recorded: dict[str, Any]) -> list[str]:
    return [
        f"{where}: holds {found[name]} {name.replace('_', ' ')}, the manifest says {recorded[name]}"
        for name in COUNTED
        if found[name] != recorded[name]
    ]


def _check_ledger(path: Path, manifest: Manifest, seen: dict[str, Counter]) -> list[str]:
    problems = []
    for name in sorted(seen.keys() - manifest.datasets.keys()):
        problems.append(f"{path}: dataset {name} is in the parts but not in the manifest")
    for name, entry in manifest.datasets.items():
        problems += _unequal(f"{path}: dataset {name}", seen.get(name, Counter()), entry)
        if entry["read"] != entry["rows"] + sum(entry["dropped"].values()):
            problems.append(f"{path}: dataset {name}: rows and dropped don't add up to the {entry['read']} read")
        if "funnel" in entry:
            problems += [f"{path}: dataset {name}: {one}" for one in funnel.imbalances(entry["funnel"])]
            if entry["funnel"]["passed"] != entry["read"] - entry["from_base"]:
                problems.append(f"{path}: dataset {name}: other samples were read than passed validation")
    problems += _unequal(str(path), sum(seen.values(), Counter()), manifest.totals)
    read = sum(one.rows for one in manifest.inputs)
    if read != sum(entry["read"] for entry in manifest.datasets.values()):
        problems.append(f"{path}: the inputs hold {read} rows, the datasets' counts say otherwise")
    return problems
