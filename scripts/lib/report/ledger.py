"""The way from source rows to samples of the corpus, every loss with its reason, and whether it adds up."""

import itertools
from dataclasses import dataclass, field

from scripts.lib.prompts.defects import DEFECTS, NOT_USED
from scripts.lib.report.run import DatasetRun, Run, rows_of

_MEANINGS = {
    "weight": "left out by the dataset's weight",
    "superseded": "a newer sample has the same id",
    "waiting": "in shards that are not validated yet",
}


@dataclass(slots=True)
class Change:
    """Rows lost (`count` below 0) or added between two steps."""

    reason: str
    count: int
    meaning: str = ""


@dataclass(slots=True)
class LedgerStep:
    """A point on the way, and what changed since the one before. `count` is None while it is not known."""

    name: str
    count: int | None
    changes: list[Change] = field(default_factory=list)


@dataclass(slots=True)
class LossLedger:
    """The steps of one dataset, and where their numbers contradict each other."""

    dataset: str
    steps: list[LedgerStep]
    problems: list[str]

    def count(self, step: str) -> int | None:
        """Rows at a step."""
        return next(one.count for one in self.steps if one.name == step)

    @property
    def first(self) -> int | None:
        """Source rows."""
        return self.steps[0].count

    @property
    def last(self) -> int | None:
        """Samples in the corpus."""
        return self.steps[-1].count

    @property
    def largest(self) -> int:
        """The longest bar of a drawing."""
        return max(one.count or 0 for one in self.steps)


def ledger_of(one: DatasetRun) -> LossLedger:
    """The ledger of a dataset, from the counts of every stage that is done."""
    steps = [_source(one), _prompts(one), *_samples(one), _passed(one), _corpus(one)]
    return LossLedger(one.name, steps, [*_sums(steps), *_contradictions(one)])


def _source(one: DatasetRun) -> LedgerStep:
    return LedgerStep("source rows", one.source["rows"] if one.source else None)


def _prompts(one: DatasetRun) -> LedgerStep:
    if not one.source:
        return LedgerStep("prompts", None)
    reasons = one.source["reasons"].items()
    return LedgerStep(
        "prompts",
        one.source["kept"],
        [Change(reason, -entry["count"], (DEFECTS | NOT_USED).get(reason, "")) for reason, entry in reasons],
    )


def _samples(one: DatasetRun) -> list[LedgerStep]:
    """Prompts that have a sample, then samples: a prompt gives several where its turns don't merge."""
    counts = one.validated
    if not counts:
        return [LedgerStep("answered", None), LedgerStep("samples", None)]
    lost = [Change(outcome, -count) for outcome, count in counts["without_sample"].items()]
    waiting = (one.source["kept"] if one.source else counts["prompts"]) - counts["prompts"]
    if waiting > 0:
        lost.append(Change("waiting", -waiting, _MEANINGS["waiting"]))
    with_sample = counts["prompts"] - sum(counts["without_sample"].values())
    more = counts["samples"] - with_sample
    return [
        LedgerStep("answered", with_sample, lost),
        LedgerStep(
            "samples",
            counts["samples"],
            [Change("more turns", more, "turns that don't merge are a sample each")] if more else [],
        ),
    ]


def _passed(one: DatasetRun) -> LedgerStep:
    if not one.validated:
        return LedgerStep("passed", None)
    return LedgerStep(
        "passed",
        one.validated["passed"],
        [Change(check, -count) for check, count in one.validated["rejects"].items()],
    )


def _corpus(one: DatasetRun) -> LedgerStep:
    if one.corpus is None:
        return LedgerStep("corpus", None)
    changes = [Change(reason, -count, _MEANINGS.get(reason, "")) for reason, count in one.corpus["dropped"].items()]
    if one.corpus["from_base"]:
        changes.insert(0, Change("base", one.corpus["from_base"], "came with merge.base"))
    return LedgerStep("corpus", one.corpus["rows"], [change for change in changes if change.count])


def _sums(steps: list[LedgerStep]) -> list[str]:
    """Every step is the one before plus its changes."""
    problems = []
    for before, step in itertools.pairwise(steps):
        if before.count is None or step.count is None:
            continue
        expected = before.count + sum(change.count for change in step.changes)
        if expected != step.count:
            problems.append(f"{before.name} with all changes make {expected:,} {step.name}, there are {step.count:,}")
    return problems


def _contradictions(one: DatasetRun) -> list[str]:
    """Where two files tell different numbers of the same thing."""
    problems = []
    if one.source and one.prompt_rows != one.source["kept"]:
        problems.append(f"the prompt shards hold {one.prompt_rows:,} rows, report.json says {one.source['kept']:,}")
    if one.answers.prompts != sum(one.answers.outcomes.values()):
        problems.append(f"{one.answers.prompts:,} completions have {sum(one.answers.outcomes.values()):,} outcomes")
    prompts = {path.stem: rows_of(path) for path in one.shards["prompts"]}
    for path in one.shards["completions"]:
        rows = rows_of(path)
        if rows != prompts.get(path.stem, rows):
            problems.append(f"shard {path.stem} has {prompts[path.stem]:,} prompts and {rows:,} outcomes")
    for path in one.shards["validated"]:
        counts = one.validations.get(path.stem)
        if counts is None:
            problems.append(f"shard {path.stem} is validated, its counts are missing")
            continue
        if one.data_class == "B" and sum(counts["outcomes"].values()) != counts["prompts"]:
            problems.append(f"shard {path.stem}: the outcomes don't add up to its {counts['prompts']:,} prompts")
        for what, file, told in (
            ("passed samples", path, counts["passed"]),
            ("rejects", path.with_suffix(".rejects.parquet"), sum(counts["rejects"].values())),
        ):
            rows = rows_of(file) if file.is_file() else 0
            if rows != told:
                problems.append(f"shard {path.stem}: {told:,} {what} are counted, {file.name} holds {rows:,}")
    if one.validated and len(one.validations) == len(one.shards["completions"]):
        told = one.validated["outcomes"]
        found = {name: count for name, count in one.answers.outcomes.items() if count}
        if told != found:
            problems.append(f"validation counted the outcomes {told}, the completions hold {found}")
    return problems


def corpus_problems(run: Run) -> list[str]:
    """Where the corpus and its manifest contradict each other, by the footers of its parts."""
    if run.corpus is None:
        return []
    folder, manifest = run.results.training, run.corpus.manifest
    problems = []
    for part in manifest.parts:
        path = folder / part.file
        rows = rows_of(path) if path.is_file() else None
        if rows != part.rows:
            problems.append(
                f"{part.file} {f'holds {rows:,} samples' if rows is not None else 'is missing'}, the manifest says {part.rows:,}"
            )
    for what in ("rows", "tokens", "supervised_tokens"):
        total = sum(entry[what] for entry in manifest.datasets.values())
        if total != manifest.totals[what]:
            problems.append(
                f"the datasets hold {total:,} {what.replace('_', ' ')}, the manifest says {manifest.totals[what]:,}"
            )
    return problems
