"""What the files of a run tell at this moment, stage by stage. A stage that hasn't run is absent, not an error."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from scripts.lib.completions.progress import Figures, ProgressFile, RunProgress
from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import Results
from scripts.lib.report.answers import AnswerSums, read_answers, read_prompt_lengths
from scripts.lib.training import backup, manifest
from scripts.lib.training.manifest import DatasetCounts, Manifest
from scripts.lib.training.versions import current
from scripts.lib.validated import statistics
from scripts.lib.validated.lengths import Lengths

STAGES = ("prompts", "completions", "tokens", "validated")


@dataclass
class DatasetRun:
    """One dataset. `shards[stage]` are the finished shard files of a stage."""

    name: str
    data_class: str
    max_tokens: int | None  # of an answer; None for class A
    shards: dict[str, list[Path]]
    source: dict[str, Any] | None = None  # report.json of prepare_prompts
    prompt_rows: int = 0
    prompt_lengths: Lengths = field(default_factory=Lengths)
    progress: Figures = field(default_factory=Figures)
    answers: AnswerSums = field(default_factory=AnswerSums)
    validations: dict[str, dict[str, Any]] = field(default_factory=dict)  # shard -> what validate_tokens counted
    corpus: DatasetCounts | None = None  # the manifest's entry

    @cached_property
    def validated(self) -> dict[str, Any]:
        """Sums over the validated shards; {} without any."""
        numbers = (
            {key: value for key, value in one.items() if isinstance(value, int | dict)}
            for one in self.validations.values()
        )
        return statistics.add_up(numbers)

    @cached_property
    def supervised_lengths(self) -> Lengths:
        """Supervised tokens of every sample that passed."""
        made = Lengths()
        for one in self.validations.values():
            made.merge(Lengths.of(one["statistics"]["supervised_lengths"]))
        return made

    @property
    def answer_lengths(self) -> Lengths:
        """Tokens of each sampled answer; of a class-A dataset, supervised tokens of each sample."""
        return self.answers.lengths if self.data_class == "B" else self.supervised_lengths

    @property
    def mean_answer(self) -> float | None:
        """Supervised tokens per sample that passed; before validation, output tokens per answered prompt."""
        checked = self.validated.get("statistics")
        if checked and checked["samples"]:
            return checked["supervised_tokens"] / checked["samples"]
        done = self.progress.completed + self.progress.failed
        return self.progress.total_output_tokens / done if done else None


@dataclass
class Version:
    """A corpus as its manifest tells it: the current one or that of a backup."""

    name: str
    manifest: Manifest

    def mean_answer(self, dataset: str) -> float | None:
        """Supervised tokens per sample of a dataset; None when it has none."""
        entry = self.manifest.datasets.get(dataset)
        return entry["supervised_tokens"] / entry["rows"] if entry and entry["rows"] else None


@dataclass
class Run:
    """The whole run. `corpus_is_current` tells whether the corpus holds the validated shards that lie there now."""

    config: Config
    results: Results
    datasets: dict[str, DatasetRun]
    progress: RunProgress
    target: dict[str, Any] | None
    corpus: Version | None
    corpus_is_current: bool
    earlier: list[Version]  # the oldest first; not the current one, unless that is of an earlier run

    @property
    def finished(self) -> bool:
        return self.corpus is not None and self.corpus_is_current

    def shard_count(self, stage: str) -> tuple[int, int]:
        """(finished, planned) shards of a stage. Class A has no completions."""
        names = self.config.by_class("B") if stage == "completions" else list(self.config.datasets)
        return sum(len(self.datasets[name].shards[stage]) for name in names), len(names) * self.config.shards


def gather(config: Config, folder: Path) -> Run:
    """Read what there is. Raises UserError for a file that is there but broken."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: name the one that a run writes to")
    results = Results(folder)
    progress = ProgressFile(results.state.folder, config, "", "").gather()
    datasets = {name: _dataset(config, results, name, progress) for name in config.datasets}
    corpus = _corpus(results)
    is_current = corpus is not None and _is_current(results, datasets)
    if corpus is not None:
        for name, one in datasets.items():
            one.corpus = corpus.manifest.datasets.get(name) if is_current else None
    facts = results.target / "target.json"
    return Run(
        config=config,
        results=results,
        datasets=datasets,
        progress=progress,
        target=durable.read_json(facts) if facts.is_file() else None,
        corpus=corpus,
        corpus_is_current=is_current,
        earlier=_earlier(results, corpus, is_current),
    )


def _dataset(config: Config, results: Results, name: str, progress: RunProgress) -> DatasetRun:
    settings = config.datasets[name]
    shards = {
        stage: [path for shard in config.shard_names() if (path := results.shard(stage, name, shard)).is_file()]
        for stage in STAGES
    }
    if settings.data_class == "A":
        shards["completions"] = []  # left from a time when it was of class B
    report = results.prompts_report(name)
    one = DatasetRun(
        name=name,
        data_class=settings.data_class,
        max_tokens=config.lanes[settings.lane].max_tokens if settings.data_class == "B" else None,
        shards=shards,
        source=durable.read_json(report) if report.is_file() else None,
        prompt_rows=sum(rows_of(path) for path in shards["prompts"]),
        prompt_lengths=read_prompt_lengths(shards["prompts"]),
        progress=progress.datasets.get(name, Figures()),
        answers=read_answers(shards["completions"]),
    )
    for path in shards["validated"]:
        counts = path.with_suffix(".json")
        if counts.is_file():
            one.validations[path.stem] = _counts(counts)
    return one


def _counts(path: Path) -> dict[str, Any]:
    counts = durable.read_json(path)
    needed = {"prompts", "outcomes", "without_sample", "samples", "passed", "rejects", "reconstruction", "statistics"}
    if missing := needed - counts.keys():
        raise UserError(f"{path}: not counts of validate_tokens (no {min(missing)}): delete it and run again")
    return counts


def rows_of(path: Path) -> int:
    """Rows of a Parquet file, from its footer. Raises UserError when it is broken."""
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}): delete it and run again") from None


def _corpus(results: Results) -> Version | None:
    directory = current(results.training)
    return Version("the corpus before", manifest.read_manifest(directory)) if directory else None


def _is_current(results: Results, datasets: dict[str, DatasetRun]) -> bool:
    """By time, as Snakemake decides: the merge's receipt is there and no validated shard is newer."""
    receipt = results.state.receipt("training")
    if not receipt.is_file():
        return False
    made = receipt.stat().st_mtime
    return all(path.stat().st_mtime <= made for one in datasets.values() for path in one.shards["validated"])


def _earlier(results: Results, corpus: Version | None, is_current: bool) -> list[Version]:
    """Corpus versions of earlier runs, the oldest first."""
    versions = [
        Version(f"the backup of {one.created[:16].replace('T', ' ')}", told)
        for one, told in backup.with_manifests(results.backups)
    ]
    if corpus is None:
        return versions
    others = [one for one in versions if one.manifest.version != corpus.manifest.version]
    return others if is_current else [*others, corpus]
