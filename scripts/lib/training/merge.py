"""Stage 5: validated shards, and a base corpus if there is one, become the training corpus.

Memory stays bounded whatever the size (see `shuffle`), equal inputs give equal bytes, and the corpus
that was there stays whole until the new one takes its place in one rename (see `versions`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.lib.config.model import Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import durable, open_files, records
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import Results
from scripts.lib.core.provenance import differences, digest, same_tokenizer
from scripts.lib.target.model import FACTS_FILE
from scripts.lib.training import inputs, versions
from scripts.lib.training.base_gates import BaseGates, Limits, limits_of
from scripts.lib.training.counts import labels, per_dataset, tokens_per_row
from scripts.lib.training.inputs import MergedFile
from scripts.lib.training.manifest import (
    MANIFEST,
    CorpusTotals,
    DatasetCounts,
    Funnel,
    Input,
    Manifest,
    Part,
    read_manifest,
    require_whole,
    version_of,
    write_manifest,
)
from scripts.lib.training.shuffle import Buckets, ahead, share_keys
from scripts.lib.training.succession import losses
from scripts.lib.validated import funnel

BUCKET_BYTES = 64 << 20  # Arrow bytes of one hash bucket: the second pass holds a few of them
GROUP_TOKENS = 8 << 20  # a row group is cut after ROWS_PER_GROUP samples or this many tokens
SPARE_FILES = 100  # file descriptors left to the rest of the process


@dataclass(slots=True)
class MergeCounts:
    """What became of one dataset's samples in the merge."""

    read: int = 0
    from_base: int = 0  # of those read
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"weight": 0, "superseded": 0})
    ids_origin: dict[str, int] = field(default_factory=dict)
    outcome: dict[str, int] = field(default_factory=dict)


def merge(
    config: Config, shards: Iterable[Path], summary: dict[str, Any], training: Path, say: Callable[[str], None]
) -> Manifest:
    """Merge validated shards and `merge.base` into a new version and let `training` point to it.

    `summary` is that of validation; its counts go into the manifest and must fit the shards, as must the
    reports of prompts beside `training` if there are any. Of two samples with one id the newer wins:
    shards over the base, later files over earlier ones. Nothing is written when a version of the same
    inputs is there. Raises UserError for inputs that don't fit together, when the disk is too small,
    when the new corpus would lose much of the one in place, and when another writer is at work.
    """
    versions.current(training)
    with versions.writer(training):
        base = inputs.base_files(Path(config.merge.base)) if config.merge.base else []
        sources = base + [inputs.validated_shard(path) for path in shards]
        if not sources:
            raise UserError("merge: no validated shard and no merge.base is given")
        settings = stage_settings(config, "training")
        settings["merge"].pop("base")  # its files are known by their bytes, wherever they lie
        target, notes = _one_target(sources)
        limits = limits_of(config.validation, target, _facts(training, target)) if base else Limits()
        if base:
            settings["base_gates"] = limits.as_settings()
        counted = funnel.funnels(summary, training.parent / "prompts")
        version = version_of(settings, [(one.name, one.kind, one.sha256) for one in sources], counted)
        directory = versions.corpora(training) / version
        if directory.is_dir():
            manifest = require_whole(directory)
            say(f"merge: version {version} is there already ({manifest.totals['rows']} samples)")
        else:
            directory.parent.mkdir(parents=True, exist_ok=True)
            _require_space(sources, directory.parent)
            with versions.staging(directory) as folder:
                for note in notes:
                    say(f"merge: {note}")
                manifest = _build(config, settings, version, sources, counted, (target, notes), limits, folder, say)
        if not config.merge.may_shrink:
            _require_successor(training, manifest)
        versions.swap(training, directory)
        say(f"merge: the corpus is in {training}")
    return manifest


def _require_successor(training: Path, manifest: Manifest) -> None:
    """Raise UserError when the corpus in place holds what the new one lost, by a forgotten line of a configuration."""
    directory = versions.current(training)
    if directory is None or not (directory / MANIFEST).is_file():
        return
    if lost := losses(read_manifest(directory), manifest):
        raise UserError(
            f"{training}: {'; '.join(lost)}: version {manifest.version} is made but not put in place: name what is "
            "missing (datasets, merge.base), or set merge.may_shrink: true to mean it"
        )


def _require_space(sources: list[MergedFile], directory: Path) -> None:
    # Spill files shrink while parts grow, and are the larger of the two.
    durable.require_free_space(directory, int(sum(source.memory for source in sources) * 1.05), "the merge")


def _build(
    config: Config,
    settings: dict[str, Any],
    version: str,
    sources: list[MergedFile],
    funnels: dict[str, Any],
    made_for: tuple[dict[str, Any], list[str]],
    limits: Limits,
    folder: Path,
    say: Callable[[str], None],
) -> Manifest:
    target, notes = made_for
    gates = BaseGates(limits)
    counts: dict[str, MergeCounts] = {}
    buckets = Buckets(folder, records.SAMPLE_SCHEMA, _bucket_count(sources), config.merge.seed)
    for source in sources:
        for batch in ahead(inputs.batches(source, gates)):
            buckets.add(_weighted(batch, source, config, counts))
        say(f"merge: read {source.name}: {source.rows} samples")
    _count_refused(gates, counts)
    for line in gates.lines():
        say(f"merge: refused rows of the base: {line}")
    gates.require_few(config.validation.max_reject_rate)
    if gates.refused:
        told = ", ".join(f"{check} {number:,}" for check, number in gates.counts())
        notes = [*notes, f"merge.base: {gates.refused.total():,} of {gates.rows:,} rows are left out: {told}"]
    _check_accounting(counts, funnels)

    provenance = {"stage": "training", "version": version, "settings": settings, "target": target}
    parts = PartWriter(folder, config.merge.rows_per_part, provenance)
    for kept, superseded in buckets.sorted():
        for name, number in _value_counts(superseded["dataset"]):
            counts[name].dropped["superseded"] += number
        parts.add(kept, counts)
    parts.close()
    if not parts.parts:
        raise UserError("merge: no sample is left: see the counts of validation, and the weights in the config")
    if not config.merge.mixed_ids_origin:
        _refuse_mixed_origin(counts)

    manifest = Manifest(
        version=version,
        totals=CorpusTotals(
            rows=sum(part.rows for part in parts.parts),
            tokens=sum(part.tokens for part in parts.parts),
            supervised_tokens=sum(part.supervised_tokens for part in parts.parts),
        ),
        parts=parts.parts,
        datasets={
            name: _ledger(counts.get(name, MergeCounts()), funnels.get(name))
            for name in sorted(counts.keys() | funnels.keys())
        },
        settings=settings,
        target=target,
        inputs=[
            Input(source.name, source.kind, source.sha256, source.rows, digest(source.provenance)) for source in sources
        ],
        provenance={digest(source.provenance): source.provenance for source in sources},
        notes=notes,
    )
    write_manifest(manifest, folder)
    say(
        f"merge: version {version}: {manifest.totals['rows']} samples, {manifest.totals['tokens']} tokens "
        f"({manifest.totals['supervised_tokens']} supervised) in {len(parts.parts)} parts"
    )
    return manifest


def _facts(training: Path, target: dict[str, Any]) -> dict[str, Any] | None:
    """What the target's folder beside the corpus tells; None without one, or when it is another target's."""
    path = Results(training.parent).target / FACTS_FILE
    if not path.is_file():
        return None
    facts = durable.read_json(path)
    return facts if facts.get("tokenizer_hash") == target.get("tokenizer_hash") else None


def _count_refused(gates: BaseGates, counts: dict[str, MergeCounts]) -> None:
    for (name, check), number in sorted(gates.refused.items()):
        one = counts.setdefault(name, MergeCounts())
        one.read += number
        one.from_base += number
        one.dropped[check] = one.dropped.get(check, 0) + number


def _bucket_count(sources: list[MergedFile]) -> int:
    """As many buckets as keep one at BUCKET_BYTES, within the limit of open files."""
    wanted = max(1, -(-sum(source.memory for source in sources) // BUCKET_BYTES))
    power = 1 << (wanted - 1).bit_length()
    allowed = open_files.allow(power + SPARE_FILES)
    while power + SPARE_FILES > allowed and power > 1:
        power //= 2
    return power


def _weighted(
    batch: pa.RecordBatch, source: MergedFile, config: Config, counts: dict[str, MergeCounts]
) -> pa.RecordBatch:
    """Count a batch's rows by dataset and keep the share that the weights tell, by seeded hash of the prompt."""
    present = _value_counts(batch["dataset"])
    for name, number in present:
        one = counts.setdefault(name, MergeCounts())
        one.read += number
        one.from_base += number if source.kind == "base" else 0
    weights = {name: _weight(name, source, config) for name, _ in present}
    if all(weight >= 1 for weight in weights.values()):
        return batch
    # By prompt, so that the samples of one conversation stay together.
    keys = share_keys(batch["prompt_id"], config.merge.seed)
    dataset = batch["dataset"].to_numpy(zero_copy_only=False)
    keep = np.ones(len(batch), bool)
    for name, weight in weights.items():
        if weight < 1:
            out = (dataset == name) & (keys >= np.uint64(int(weight * 2**64)))
            counts[name].dropped["weight"] += int(out.sum())
            keep &= ~out
    return batch.filter(pa.array(keep))


def _weight(name: str, source: MergedFile, config: Config) -> float:
    if source.kind == "base":
        return config.merge.base_weight
    if name not in config.datasets:
        raise UserError(f"{source.path}: holds samples of the dataset {name!r}, which the config doesn't name")
    return config.datasets[name].weight


def _value_counts(values: pa.Array | pa.ChunkedArray) -> list[tuple[str, int]]:
    return [(row["values"], row["counts"]) for row in pc.value_counts(values).to_pylist()]


class PartWriter:
    """Cuts a stream of samples into Parquet parts whose bytes don't depend on how the stream was chunked."""

    def __init__(self, folder: Path, rows_per_part: int, provenance: dict[str, Any]) -> None:
        self.parts: list[Part] = []
        self._folder = folder
        self._rows_per_part = rows_per_part
        self._schema = records.with_provenance(records.SAMPLE_SCHEMA, provenance)
        self._waiting: list[pa.Table] = []
        self._rows = 0  # of the row group that is being collected
        self._tokens = 0
        self._supervised = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, samples: pa.Table, counts: dict[str, MergeCounts]) -> None:
        """Append samples and count them by dataset."""
        for batch in samples.to_batches():
            lengths, sums = tokens_per_row(batch)
            for name, sizes in per_dataset(batch, lengths, sums):
                for size, number in sizes.items():
                    setattr(counts[name], size, getattr(counts[name], size) + number)
            for column in ("ids_origin", "outcome"):
                for name, value, rows in labels(batch, column):
                    of = getattr(counts[name], column)
                    of[value] = of.get(value, 0) + rows
            running = np.cumsum(lengths)
            start = 0
            while start < len(batch):
                before = int(running[start - 1]) if start else 0
                room = min(records.ROWS_PER_GROUP, self._rows_per_part - self._written) - self._rows
                # At least one sample goes into each group, however long it is.
                fits = int(np.searchsorted(running, before + GROUP_TOKENS - self._tokens, side="left")) + 1 - start
                end = min(len(batch), start + min(room, fits))
                self._waiting.append(pa.Table.from_batches([batch.slice(start, end - start)]))
                self._rows += end - start
                self._tokens += int(running[end - 1]) - before
                self._supervised += int(sums[start:end].sum())
                start = end
                if self._rows == min(records.ROWS_PER_GROUP, self._rows_per_part - self._written) or (
                    self._tokens >= GROUP_TOKENS
                ):
                    self._flush()

    @property
    def _written(self) -> int:
        return self.parts[-1].rows if self._writer else 0

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            file = f"part-{len(self.parts):05d}.parquet"
            self._writer = pq.ParquetWriter(self._folder / file, self._schema, compression="zstd")
            self.parts.append(Part(file, "", 0, 0, 0, 0))
        # One chunk: page boundaries in the file follow the chunks of the table.
        group = pa.concat_tables(self._waiting).combine_chunks().cast(self._schema)
        self._writer.write_table(group, row_group_size=len(group))
        part = self.parts[-1]
        part.rows += len(group)
        part.tokens += self._tokens
        part.supervised_tokens += self._supervised
        self._waiting, self._rows, self._tokens, self._supervised = [], 0, 0, 0
        if part.rows >= self._rows_per_part:
            self._finish_part()

    def _finish_part(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        path = self._folder / self.parts[-1].file
        path.chmod(path.stat().st_mode & 0o444)  # as readable as the umask says, for nobody to write
        durable.fsync_file(path)
        self.parts[-1].sha256 = durable.sha256_file(path)
        self.parts[-1].bytes = path.stat().st_size

    def close(self) -> None:
        """Write what waits and finish the last part."""
        self._flush()
        self._finish_part()


def _check_accounting(counts: dict[str, MergeCounts], funnels: dict[str, dict[str, Any]]) -> None:
    """Raise UserError when the shards hold other numbers of samples than validation passed."""
    for name in sorted(counts.keys() | funnels.keys()):
        one = counts.get(name, MergeCounts())
        read = one.read - one.from_base
        passed = funnels[name]["passed"] if name in funnels else 0
        if read != passed:
            raise UserError(
                f"merge: the shards of {name} hold {read} samples, the summary of validation says {passed} passed: "
                "give all shards of one run, and its summary"
            )


def _one_target(sources: list[MergedFile]) -> tuple[dict[str, Any], list[str]]:
    """The target that all inputs were made for, and notes on what is not known to be the same.

    Raises UserError for two tokenizers: one of them would make the ids meaningless.
    """
    notes = []
    first: MergedFile | None = None
    for source in reversed(sources):  # shards first: the run's own target is what the base must fit
        if source.ignored_columns:
            notes.append(f"{source.name}: columns left out: {', '.join(source.ignored_columns)}")
        target = source.provenance.get("target")
        if not target:
            notes.append(f"{source.name}: does not tell its tokenizer: that it is the same is not checked")
            continue
        first = first or source
        changed = differences(target, first.provenance["target"])
        if not same_tokenizer(target, first.provenance["target"]):
            raise UserError(
                f"{source.path}: its ids come from another tokenizer than those of {first.path} ({'; '.join(changed)}): "
                "leave one of them out"
            )
        notes += [f"{source.name}: made for another target than {first.name}: {change}" for change in changed]
    return (first.provenance["target"] if first else {}), sorted(set(notes))


def _refuse_mixed_origin(counts: dict[str, MergeCounts]) -> None:
    exact = sorted(name for name, one in counts.items() if "engine" in one.ids_origin)
    rebuilt = sorted(name for name, one in counts.items() if "reconstructed" in one.ids_origin)
    if exact and rebuilt:
        raise UserError(
            f"merge.mixed_ids_origin is false, but ids of {', '.join(rebuilt)} are reconstructed from text and "
            f"those of {', '.join(exact)} are the engine's own: leave one of them out"
        )


def _ledger(counts: MergeCounts, funnel: Funnel | None) -> DatasetCounts:
    ledger = DatasetCounts(
        read=counts.read,
        from_base=counts.from_base,
        rows=counts.rows,
        tokens=counts.tokens,
        supervised_tokens=counts.supervised_tokens,
        dropped=dict(counts.dropped),
        ids_origin=dict(sorted(counts.ids_origin.items())),
        outcome=dict(sorted(counts.outcome.items())),
    )
    if funnel:
        ledger["funnel"] = funnel
    return ledger


def receipt(manifest: Manifest) -> dict[str, Any]:
    """What a run keeps of a merge: the version it made and its size."""
    return {"version": manifest.version, **manifest.totals}
