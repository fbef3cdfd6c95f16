"""Stage 4: samples that pass every gate go on, the others are kept apart with their reason, and all is accounted for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import durable, records
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import code_version
from scripts.lib.core.records import POLICIES, Completion, Reject, Sample
from scripts.lib.prompts.shard import prompt_ids
from scripts.lib.target.model import Target
from scripts.lib.target.reconstruction import reconstruct
from scripts.lib.validated.gates import Gates
from scripts.lib.validated.statistics import Statistics

# Engine turns per shard on which reconstruction from text is tried: a share is wanted, not every turn.
RECONSTRUCTED_TURNS = 200


@dataclass(slots=True)
class ShardFiles:
    """The files of one shard, inputs and outputs. `completions` is None for class A."""

    dataset: str
    prompts: Path
    completions: Path | None
    tokens: Path
    output: Path
    rejects: Path
    summary: Path


@dataclass(slots=True)
class Ledger:
    """What became of the prompts of a shard."""

    prompts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    without_sample: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    following_turns: int = 0  # turns that have a turn before them
    merged_turns: int = 0  # those that merged with it into one sample


def validate_tokens(config: Config, target: Target, shard: ShardFiles) -> dict[str, Any]:
    """Check a shard's samples and account for its prompts. Returns the summary that is written.

    Raises UserError when the shard's files don't fit together: a prompt without outcome, a sample without prompt.
    """
    gates = Gates(target, config.validation, longest_answer(config, shard.dataset))
    statistics = Statistics(target)
    refused: dict[int, tuple[str, str]] = {}
    samples_of: Counter[str] = Counter()

    def passed() -> Iterator[Sample]:
        for row, sample in enumerate(records.read_rows(shard.tokens, Sample)):
            samples_of[sample.prompt_id] += 1
            verdict = gates.refuse(sample)
            if verdict is None:
                statistics.add(sample)
                yield sample
            else:
                refused[row] = verdict

    provenance = {
        "stage": "validated",
        "settings": stage_settings(config, "validated"),
        "target": target.provenance(),
        "code": code_version(),
        "inputs": [records.read_provenance(shard.tokens)],
    }
    records.write_rows(shard.output, Sample, passed(), provenance)
    records.write_rows(shard.rejects, Reject, _refused_rows(shard.tokens, refused), provenance)
    ledger = account(config, shard, samples_of)
    rejects = Counter(check for check, _ in refused.values())
    summary = {
        "dataset": shard.dataset,
        "validated": shard.output.name,
        "prompts": ledger.prompts,
        "outcomes": dict(sorted(ledger.outcomes.items())),
        "without_sample": dict(sorted(ledger.without_sample.items())),
        "samples": sum(samples_of.values()),
        "passed": statistics.samples,
        "rejects": {check: rejects[check] for check in gates.checks if rejects[check]},
        "finish_reasons": dict(sorted(ledger.finish_reasons.items())),
        "following_turns": ledger.following_turns,
        "merged_turns": ledger.merged_turns,
        "reconstruction": reconstruction_drift(target, shard.completions),
        "statistics": statistics.as_dict(),
    }
    durable.write_json(shard.summary, summary)
    return summary


def longest_answer(config: Config, dataset: str) -> int | None:
    """Most ids of one answer that generation asks for; None for class A, which asks for none."""
    settings = config.datasets[dataset]
    if settings.data_class == "A":
        return None
    return max(config.lanes[settings.lane].max_tokens, settings.truncation_max_tokens or 0)


def _refused_rows(tokens: Path, refused: dict[int, tuple[str, str]]) -> Iterator[Reject]:
    """The refused rows of a file of samples, read once more so that they need not wait in memory."""
    if not refused:
        return
    first = 0
    with records.open_parquet(tokens) as file:
        for batch in records.batches(file):
            for row in range(batch.num_rows):
                if first + row in refused:
                    check, detail = refused[first + row]
                    (values,) = batch.slice(row, 1).to_pylist()
                    yield records.from_dict(Reject, {**values, "check": check, "detail": detail})
            first += batch.num_rows


def account(config: Config, shard: ShardFiles, samples_of: Counter[str]) -> Ledger:
    """Follow every prompt to its samples or to the reason why it has none.

    Raises UserError when one got lost, has two outcomes, or when something came from no prompt.
    """
    ledger = Ledger()
    prompts = set(prompt_ids(shard.prompts))
    ledger.prompts = len(prompts)
    _require(shard.tokens, "samples", samples_of.keys() - prompts, "come from no prompt", shard)
    if shard.completions is None:
        _require(shard.tokens, "prompts", prompts - samples_of.keys(), "have no sample", shard)
        return ledger
    seen: set[str] = set()
    twice: set[str] = set()
    silent: set[str] = set()
    for prompt_id, outcome, finish_reasons in _outcomes(shard.completions):
        (twice if prompt_id in seen else seen).add(prompt_id)
        ledger.outcomes[outcome] += 1
        ledger.finish_reasons.update(finish_reasons)
        samples = samples_of[prompt_id]
        if not samples:
            ledger.without_sample[outcome] += 1
            if outcome == "ok" and not _dropped_by_policy(config, shard.dataset):
                silent.add(prompt_id)
        elif finish_reasons:
            ledger.following_turns += len(finish_reasons) - 1
            ledger.merged_turns += len(finish_reasons) - samples
    _require(shard.completions, "prompts", prompts - seen, "have no outcome", shard)
    _require(shard.completions, "outcomes", seen - prompts, "belong to no prompt", shard)
    _require(shard.completions, "prompts", twice, "have two outcomes", shard)
    _require(shard.tokens, "answered prompts", silent, "have no sample", shard)
    return ledger


def _dropped_by_policy(config: Config, dataset: str) -> bool:
    """Whether the dataset drops answers, so that even a prompt with outcome `ok` may lose its turns."""
    return any(getattr(config.datasets[dataset], policy) == "drop" for policy in POLICIES.values())


def _require(path: Path, things: str, ids: set[str], fault: str, shard: ShardFiles) -> None:
    if ids:
        raise UserError(
            f"{path}: {len(ids)} {things} of {shard.prompts} {fault}, such as {min(ids)}: "
            "the files are of different runs; delete this one and run again"
        )


def _outcomes(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(prompt id, outcome, finish reason of every turn) of a shard, without reading any ids."""
    with records.open_parquet(path) as file:
        columns = ["id", "outcome", "turns.list.element.finish_reason"]
        for batch in records.batches(file, columns):
            for row in batch.to_pylist():
                yield row["id"], row["outcome"], [turn["finish_reason"] for turn in row["turns"]]


def reconstruction_drift(target: Target, completions: Path | None) -> dict[str, int]:
    """How often ids put together from text differ from those that the engine sampled, where both are known.

    The share to expect in `ids_origin: reconstructed` samples of the same target. Counts turns.
    """
    counts = {"turns": 0, "drifted": 0}
    if completions is None:
        return counts
    for completion in records.read_rows(completions, Completion):
        for turn in completion.turns:
            if turn.ids_origin != "engine" or turn.eos_appended:
                continue
            try:
                ids = reconstruct(target, turn.prompt_ids, turn.content, turn.reasoning, turn.finish_reason)
            except ValueError:
                ids = []
            counts["turns"] += 1
            counts["drifted"] += ids != turn.output_ids
            if counts["turns"] == RECONSTRUCTED_TURNS:
                return counts
    return counts
