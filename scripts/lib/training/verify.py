"""Whether a corpus is what its manifest says: every byte, every sample, every field."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.lib.core import records
from scripts.lib.core.provenance import digest
from scripts.lib.training import shuffle
from scripts.lib.training.counts import COUNTED, labels, per_dataset, tokens_per_row
from scripts.lib.training.manifest import (
    MANIFEST,
    UNSEALED,
    Manifest,
    Part,
    broken_seal,
    damaged_parts,
    read_manifest,
    version_of,
)
from scripts.lib.validated import funnel

MOST = 5  # lines of one kind
_NEEDED = ("id", "dataset", "input_ids", "loss_mask", "ids_origin", "outcome")  # columns that are counted here


class Problems(list[str]):
    """One line per problem, at most MOST of a kind: a wrong seed puts half of a corpus out of order."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._counts.total()

    def add(self, kind: str, line: str) -> None:
        """`kind` is what the line is one of many of."""
        self._counts[kind] += 1
        if self._counts[kind] <= MOST:
            self.append(line)

    def close(self) -> None:
        """Say how many lines were kept back."""
        for kind, count in self._counts.items():
            if count > MOST:
                self.append(f"... and {count - MOST:,} more: {kind}")


@dataclass(slots=True)
class _Seen:
    """What the parts hold of a dataset."""

    sizes: Counter[str] = field(default_factory=Counter)
    ids_origin: Counter[str] = field(default_factory=Counter)
    outcome: Counter[str] = field(default_factory=Counter)


def verify(directory: Path) -> tuple[Manifest, Problems]:
    """Check a corpus against its manifest. Returns the manifest and the problems found.

    Checked: the manifest's seal and the SHA-256 of every part; lengths, masks and ids of every sample; no id twice;
    order of the seeded shuffle; samples and tokens per part, per dataset and in all; origins and outcomes; that the
    ledger adds up; that version, target and provenance are those of the inputs; that no stray part lies in the folder.
    Memory holds one row group.
    """
    manifest = read_manifest(directory)
    problems = Problems()
    for line in broken_seal(directory, manifest):
        problems.add("seal", line)
    damaged = damaged_parts(directory, manifest)
    for line in damaged:
        problems.add("damaged parts", line)
    stray = {path.name for path in directory.glob("*.parquet")} - {part.file for part in manifest.parts}
    for name in sorted(stray):
        problems.add("not in the manifest", f"{directory / name}: is not in the manifest")
    if not damaged:
        seen = _Rows(manifest, problems).read(directory)
        for line in [*_ledger(manifest, seen), *_origin(directory, manifest)]:
            problems.add("the manifest", f"{directory / MANIFEST}: {line}")
    problems.close()
    return manifest, problems


class _Rows:
    """Reads all parts in order."""

    def __init__(self, manifest: Manifest, problems: Problems) -> None:
        self.manifest, self.problems = manifest, problems
        self.seen: dict[str, _Seen] = {}
        vocab_size = manifest.target.get("vocab_size")
        self.vocab_size = vocab_size if isinstance(vocab_size, int) else None
        self.last: tuple[int, str] = (-1, "")

    def read(self, directory: Path) -> dict[str, _Seen]:
        """What each dataset has in the parts."""
        seed = self.manifest.settings.get("merge", {}).get("seed")
        if not isinstance(seed, int):
            self.problems.add("the manifest", f"{directory / MANIFEST}: settings.merge.seed is no number")
            seed = None
        for part in self.manifest.parts:
            self._part(directory / part.file, part, seed)
        return self.seen

    def _part(self, path: Path, part: Part, seed: int | None) -> None:
        with records.open_parquet(path) as file:
            odd = _odd_columns(file.schema_arrow)
            found: Counter[str] = Counter()
            for group in range(0 if odd else file.num_row_groups):
                table = file.read_row_group(group, columns=list(_NEEDED), use_threads=True).combine_chunks()
                if nulls := [name for name in _NEEDED if table[name].null_count]:
                    self.problems.add("columns", f"{path}: column `{nulls[0]}` holds nulls")
                    continue
                for row, kind, text in row_problems(table, self.vocab_size):
                    self.problems.add(kind, f"{path}:{found['rows'] + row}: {text}")
                if seed is not None:
                    self._order(table, seed, path, found["rows"])
                self._count(table, found)
        for line in odd:
            self.problems.add("columns", f"{path}: {line}")
        for line in _unequal(found, asdict(part)):
            self.problems.add("counts of a part", f"{path}: {line}")

    def _order(self, table: pa.Table, seed: int, path: Path, first: int) -> None:
        keys = shuffle.order_keys(table["id"], seed)
        for row, this in enumerate(zip(keys.tolist(), table["id"].to_pylist())):
            if this == self.last:
                self.problems.add("id twice", f"{path}:{first + row}: id {this[1]} is there twice")
            elif this < self.last:
                self.problems.add(
                    "out of the shuffle's order", f"{path}:{first + row}: id {this[1]} is out of the shuffle's order"
                )
            self.last = this

    def _count(self, table: pa.Table, found: Counter[str]) -> None:
        for name, counts in per_dataset(table, *tokens_per_row(table)):
            self.seen.setdefault(name, _Seen()).sizes.update(counts)
            found.update(counts)
        for column in ("ids_origin", "outcome"):
            for name, value, rows in labels(table, column):
                getattr(self.seen[name], column)[value] += rows


def _odd_columns(schema: pa.Schema) -> list[str]:
    lines = []
    for name in _NEEDED:
        if name not in schema.names:
            lines.append(f"has no column `{name}`")
        elif schema.field(name).type != records.SAMPLE_SCHEMA.field(name).type:
            lines.append(f"column `{name}` is of type {schema.field(name).type}")
    return lines


def row_problems(rows: pa.Table | pa.RecordBatch, vocab_size: int | None) -> list[tuple[int, str, str]]:
    """`(row, kind, problem)` for rows that are no samples; of bad values only the first is named.

    Ids must lie in [0, vocab_size); None when the vocabulary is not known.
    """
    vocab_size = vocab_size or np.iinfo(np.int32).max
    lengths = pc.list_value_length(rows["input_ids"]).to_numpy(zero_copy_only=False)
    mask_lengths = pc.list_value_length(rows["loss_mask"]).to_numpy(zero_copy_only=False)
    ids = pc.list_flatten(rows["input_ids"]).to_numpy(zero_copy_only=False)
    mask = pc.list_flatten(rows["loss_mask"]).to_numpy(zero_copy_only=False)
    problems = [(int(row), "no tokens", "has no tokens") for row in np.flatnonzero(lengths == 0)]
    problems += [
        (int(row), "mask of another length", f"has {lengths[row]} ids but {mask_lengths[row]} mask values")
        for row in np.flatnonzero(lengths != mask_lengths)
    ]
    for kind, values, row_lengths, limit, text in (
        ("mask value", mask, mask_lengths, 2, "has the mask value {}, only 0 and 1 are known"),
        ("token id", ids, lengths, vocab_size, f"has the token id {{}}, outside of 0 to {vocab_size - 1}"),
    ):
        if len(values) and (values.min() < 0 or values.max() >= limit):
            at = int(((values < 0) | (values >= limit)).argmax())
            row = int(np.searchsorted(np.cumsum(row_lengths), at, side="right"))
            problems.append((row, kind, text.format(values[at])))
    return problems


def _unequal(found: dict[str, int], recorded: Any) -> list[str]:
    return [
        f"holds {found[name]} {name.replace('_', ' ')}, the manifest says {recorded[name]}"
        for name in COUNTED
        if found[name] != recorded[name]
    ]


def _ledger(manifest: Manifest, seen: dict[str, _Seen]) -> Iterator[str]:
    """Where counts contradict the parts or each other."""
    for name in sorted(seen.keys() - manifest.datasets.keys()):
        yield f"dataset {name} is in the parts but not in the manifest"
    for name, entry in manifest.datasets.items():
        for line in _dataset(entry, seen.get(name, _Seen())):
            yield f"dataset {name}: {line}"
    yield from _unequal(sum((one.sizes for one in seen.values()), Counter()), manifest.totals)
    entries = manifest.datasets.values()
    for kind, told in (
        ("base", sum(entry["from_base"] for entry in entries)),
        ("shard", sum(entry["read"] - entry["from_base"] for entry in entries)),
    ):
        rows = sum(one.rows for one in manifest.inputs if one.kind == kind)
        if rows != told:
            yield f"the inputs of kind {kind} hold {rows} rows, the datasets' counts say {told}"


def _dataset(entry: Any, seen: _Seen) -> Iterator[str]:
    yield from _unequal(seen.sizes, entry)
    for column in ("ids_origin", "outcome"):
        if getattr(seen, column) != entry[column]:
            yield f"the {column} of its samples are {dict(getattr(seen, column))}, the manifest says {entry[column]}"
    if entry["read"] != entry["rows"] + sum(entry["dropped"].values()):
        yield f"rows and dropped don't add up to the {entry['read']} read"
    if "funnel" in entry:
        try:
            yield from funnel.imbalances(entry["funnel"])
        except KeyError as error:
            yield f"its funnel has no {error}"
        if entry["funnel"]["passed"] != entry["read"] - entry["from_base"]:
            yield "other samples were read than passed validation"


def _origin(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Where version, target and provenance are not those of the inputs and parts."""
    for key, told in manifest.provenance.items():
        if digest(told) != key:
            yield f"provenance {key} was changed"
    used = {one.provenance for one in manifest.inputs}
    for key in sorted(used ^ manifest.provenance.keys()):
        yield f"provenance {key} is {'missing' if key in used else 'that of no input'}"
    # The run's own target, told by its shards, comes last among the inputs.
    targets = [manifest.provenance.get(one.provenance, {}).get("target") for one in reversed(manifest.inputs)]
    if manifest.target != next(filter(None, targets), {}):
        yield "target is not that of the inputs"
    within = {
        "stage": "training",
        "version": manifest.version,
        "settings": manifest.settings,
        "target": manifest.target,
    }
    for part in manifest.parts:
        if records.read_provenance(directory / part.file) != within:
            yield f"{part.file} tells another version, settings or target of itself"
    if manifest.schema_version > UNSEALED:
        funnels = {name: entry["funnel"] for name, entry in manifest.datasets.items() if "funnel" in entry}
        made = version_of(manifest.settings, [(one.name, one.kind, one.sha256) for one in manifest.inputs], funnels)
        if made != manifest.version:
            yield f"version {manifest.version} is not that of these inputs and settings, {made}"
    folder = directory.resolve().name
    if re.fullmatch(r"[0-9a-f]{16}", folder) and folder != manifest.version:
        yield f"version {manifest.version} lies in the folder of another one"
