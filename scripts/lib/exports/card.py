"""The dataset card: front matter that the hub reads, then what the corpus is and where it came from, in figures.

It says of each dataset only what the manifest knows of it: ids are called exact where an engine reported them.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from scripts.lib.core.screen import visible_line
from scripts.lib.core.secrets import without_secrets
from scripts.lib.training.manifest import Manifest

# What each origin of ids means for a trainer.
ORIGINS = {
    "engine": "exact: the ids that the target model sampled, as its engine reported them",
    "reconstructed": "made from the text of a hosted API's answers: nearly always, not always, the sampled ones",
    "rendered": "not the target's own words: ready conversations, rendered with its template and tokenized",
    "given": "taken over as they were: ready tokens",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def card(manifest: Manifest) -> str:
    """README.md of the folder."""
    totals, target = manifest.totals, manifest.target
    model = target.get("name", "not recorded")
    lines = [
        "---",
        yaml.safe_dump(_front(manifest), sort_keys=False).rstrip(),
        "---",
        "",
        f"# Draft-model training corpus for {_cell(model)}",
        "",
        f"{totals['rows']:,} samples, {totals['tokens']:,} tokens, of which {totals['supervised_tokens']:,} are "
        "supervised (`loss_mask` 1, unshifted).",
        "",
        *(f"- {count:,} samples, ids **{origin}**: {_meaning(origin)}" for origin, count in _origins(manifest)),
        "",
        f"- target model: {_cell(model)}, revision {target.get('revision') or 'not pinned'}",
        f"- tokenizer hash: {target.get('tokenizer_hash', 'not recorded')}",
        f"- chat template hash: {target.get('template_hash', 'not recorded')}",
        f"- corpus version: {manifest.version} (manifest.json holds counts and provenance of every shard)",
        "",
        *_table(
            ["dataset", "samples", "tokens", "supervised", "ids", "cut at max_tokens", "thought only", "from the base"],
            [_sizes(name, entry) for name, entry in manifest.datasets.items()],
        ),
        "",
        "Cut answers end without a stop token and carry the flag `truncated`.",
        "",
        "## Where it came from",
        "",
        *_table(["dataset", "class", "source", "licence", "engine", "sampling"], list(_sources(manifest))),
        "",
        "Class B: prompts of the source, answered by the target. Class A: taken over from the source. "
        "A licence that is not recorded is that of the source: look there before passing this on.",
        "",
        "Columns: `id`, `prompt_id`, `dataset`, `input_ids`, `loss_mask`, `ids_origin`, `outcome`, `messages`, `tools`, "
        "`flags`, `template_kwargs`.",
        "",
    ]
    return "\n".join(lines)


def _front(manifest: Manifest) -> dict[str, Any]:
    front: dict[str, Any] = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "draft-model"],
        "size_categories": [_size_category(manifest.totals["rows"])],
    }
    model = str(manifest.target.get("name", ""))
    if _HUB_NAME.fullmatch(model):
        front["base_model"] = [model]
    return front


def _origins(manifest: Manifest) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for entry in manifest.datasets.values():
        for origin, rows in entry["ids_origin"].items():
            counts[origin] = counts.get(origin, 0) + rows
    return sorted(counts.items(), key=lambda item: -item[1])


def _meaning(origin: str) -> str:
    return ORIGINS.get(origin, "an origin that the base corpus names so")


def _sizes(name: str, entry: Any) -> list[str]:
    def share(count: int) -> str:
        return f"{count / entry['rows']:.1%}" if entry["rows"] else "-"

    return [
        name,
        f"{entry['rows']:,}",
        f"{entry['tokens']:,}",
        f"{entry['supervised_tokens']:,}",
        ", ".join(sorted(entry["ids_origin"])) or "-",
        share(entry["outcome"].get("length", 0)),
        share(entry["outcome"].get("reasoning_only", 0)),
        # Of the rows that were read: which of them stayed is not counted.
        f"{entry['from_base']:,} read" if entry["from_base"] else "-",
    ]


def _sources(manifest: Manifest) -> Iterator[list[str]]:
    """A row for each dataset, of what its shards say; base files say it of themselves."""
    for name, entry in manifest.datasets.items():
        keys = {one.provenance for one in manifest.inputs if one.kind == "shard" and one.name.startswith(f"{name}/")}
        told = [stage for key in keys for stage in _stages(manifest.provenance.get(key, {}))]
        prompts = [stage for stage in told if stage.get("stage") == "prompts"]
        completions = [stage for stage in told if stage.get("stage") == "completions"]
        files = [file for stage in prompts for file in stage.get("sources", [])]
        yield [
            name,
            _several(stage.get("settings", {}).get("dataset", {}).get("data_class") for stage in prompts),
            _several([*(_source(file) for file in files), "merge.base" if entry["from_base"] else ""])
            or "not recorded",
            _several(file.get("license") for file in files) or "not recorded",
            _several(_engine(stage) for stage in completions) or "-",
            _several(_settings(stage.get("settings", {}).get("sampling", {})) for stage in completions) or "-",
        ]


def _stages(provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What every stage on the way to a shard says of itself."""
    yield provenance
    for one in provenance.get("inputs", []):
        yield from _stages(one)


def _source(file: dict[str, Any]) -> str:
    name = str(file.get("name", ""))
    if "://" in name:
        name = without_secrets(name)
    elif Path(name).is_absolute():
        name = Path(name).name  # folders of this machine help nobody else
    known = [f"{key} {str(file[key])[:12]}" for key in ("revision", "sha256", "ETag") if file.get(key)]
    return f"{name} ({', '.join(known)})" if known else name


def _engine(stage: dict[str, Any]) -> str:
    engine = stage.get("engine", {})
    return f"{engine.get('kind', '')} {engine.get('version') or ''}".strip()


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _several(values: Iterable[Any]) -> str:
    return "; ".join(sorted({str(value) for value in values if value}))


def _table(headers: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(map(_cell, row))} |" for row in (headers, ["---"] * len(headers), *rows)]


def _cell(text: str) -> str:
    """Text of others in a table: one line, no markup of its own."""
    return re.sub(r"([|<>`*\[\]])", r"\\\1", visible_line(text))


def _size_category(rows: int) -> str:
    """The hub's own classes, powers of ten: `10K<n<100K`."""
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B"]
    bounds = [10**power for power in range(3, 10)]
    if rows < bounds[0]:
        return "n<1K"
    for low, high, name, following in zip(bounds, bounds[1:], names, names[1:]):
        if low <= rows < high:
            return f"{name}<n<{following}"
    return "n>1B"
