"""Where the run's files say that they come from, and whether they agree with each other and with the config."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core.provenance import canonical_json, differences
from scripts.lib.core.records import read_provenance
from scripts.lib.report.run import STAGES, Run

# What the meaning of ids and answers depends on, by dotted name in a shard's provenance.
_TARGET = {
    "name": "model",
    "revision": "revision",
    "tokenizer_hash": "tokenizer",
    "template_hash": "chat template",
    "template_kwargs": "template variables",
    "date": "date in the template",
    "vocab_size": "vocabulary",
}
# Say how many answers there are, not what they are.
_BUDGETS = ("budget.", "dataset.token_budget", "dataset.cost_budget")


@dataclass
class OriginFact:
    """A fact and its values: one when all agree. `values` maps a value to the places that tell it."""

    name: str
    dataset: str | None
    must_agree: bool
    values: dict[str, list[str]] = field(default_factory=dict)

    @property
    def mixed(self) -> bool:
        return len(self.values) > 1

    def add(self, value: Any, place: str) -> None:
        """Note that `place` tells `value`; None tells nothing."""
        if value is not None:
            self.values.setdefault(_text(value), []).append(place)

    def places(self, most: int = 3) -> Iterator[tuple[str, list[str]]]:
        """Each value with the first places that tell it."""
        for value, where in self.values.items():
            yield value, [*where[:most], *([f"and {len(where) - most} more"] if len(where) > most else [])]


@dataclass(slots=True)
class Stale:
    """Shards that were made with a setting that the config has no more."""

    dataset: str
    stage: str
    change: str  # `sampling.temperature: 0.7 -> 1.0`
    shards: list[str]


def without_folders(name: str) -> str:
    """The last part of an absolute path: a page that is passed on needs no folders of this machine."""
    return Path(name).name if Path(name).is_absolute() else name


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        told = {key: one for key, one in value.items() if one not in (None, {}, [])}
        return ", ".join(f"{key} {_text(one)}" for key, one in told.items()) or "none"
    return canonical_json(value).decode()


def origins(run: Run) -> tuple[list[OriginFact], list[Stale]]:
    """The facts for the page, and what is stale. Reads the metadata of every shard, no rows."""
    shards = {
        (name, stage, path.stem): read_provenance(path)
        for name, one in run.datasets.items()
        for stage in STAGES
        for path in one.shards[stage]
    }
    facts = [*_targets(run, shards), *_generation(run, shards), *_code(shards), *_sources(run)]
    return [fact for fact in facts if fact.values], _stale(run, shards)


def _targets(run: Run, shards: dict[tuple[str, str, str], dict]) -> Iterator[OriginFact]:
    for key, name in _TARGET.items():
        fact = OriginFact(name, None, must_agree=True)
        if run.target:
            fact.add(run.target.get(key), "target.json")
        for (dataset, stage, shard), provenance in shards.items():
            fact.add(provenance.get("target", {}).get(key), f"{stage}/{dataset}/{shard}")
        if run.corpus and run.corpus_is_current:
            fact.add(run.corpus.manifest.target.get(key), "corpus")
        yield fact


def _generation(run: Run, shards: dict[tuple[str, str, str], dict]) -> Iterator[OriginFact]:
    for name in run.config.by_class("B"):
        sampling = OriginFact("sampling", name, must_agree=True)
        limit = OriginFact("max_tokens", name, must_agree=True)
        engine = OriginFact("engine", name, must_agree=True)
        launch = OriginFact("server options", name, must_agree=False)
        for (dataset, stage, shard), provenance in shards.items():
            if dataset == name and stage == "completions":
                sampling.add(provenance.get("settings", {}).get("sampling"), shard)
                limit.add(provenance.get("settings", {}).get("max_tokens"), shard)
                told = provenance.get("engine", {})
                # Of a shard whose answers were all there the engine's version is not known.
                if told.get("version"):
                    engine.add(f"{told['kind']} {told['version']}", shard)
                    launch.add(told.get("launch"), shard)
        yield from (sampling, limit, engine, launch)
        answers = run.datasets[name].answers
        model = OriginFact("served model", name, must_agree=True)
        for reported, turns in answers.models.most_common():
            if reported:
                model.add(without_folders(reported), f"{turns:,} answers")
        provider = OriginFact("provider", name, must_agree=False)
        for reported, turns in answers.providers.most_common():
            if reported:
                provider.add(reported, f"{turns:,} answers")
        yield from (model, provider)


def _code(shards: dict[tuple[str, str, str], dict]) -> Iterator[OriginFact]:
    fact = OriginFact("code", None, must_agree=False)
    for (dataset, stage, shard), provenance in shards.items():
        fact.add(provenance.get("code"), f"{stage}/{dataset}/{shard}")
    yield fact


def _sources(run: Run) -> Iterator[OriginFact]:
    for name, one in run.datasets.items():
        for source in (one.source or {}).get("sources", []):
            fact = OriginFact("source", name, must_agree=False)
            details = {
                key: value[:12] if key == "sha256" else value
                for key, value in source.items()
                if key != "name" and value is not None
            }
            fact.add(without_folders(source["name"]) + (f" ({_text(details)})" if details else ""), "report.json")
            yield fact


def _stale(run: Run, shards: dict[tuple[str, str, str], dict]) -> list[Stale]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for (dataset, stage, shard), provenance in shards.items():
        if "settings" not in provenance:
            continue
        wanted = stage_settings(run.config, stage, None if stage == "validated" else dataset)
        for change in differences(provenance["settings"], wanted):
            if not change.startswith(_BUDGETS):
                found.setdefault((dataset, stage, change), []).append(shard)
    return [Stale(dataset, stage, change, shards) for (dataset, stage, change), shards in found.items()]
