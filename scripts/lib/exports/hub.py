"""A Hugging Face `datasets` folder: the corpus' own parts under data/ and a card, ready to push to the hub."""

from pathlib import Path

import yaml

from scripts.lib.core import durable
from scripts.lib.exports.report import Report
from scripts.lib.target.model import Target
from scripts.lib.training.manifest import MANIFEST
from scripts.lib.training.reader import Corpus


def export(corpus: Corpus, target: Target, folder: Path, report: Report) -> None:
    """Copy the parts, named as the hub names shards, with the manifest and a card."""
    data = folder / "data"
    data.mkdir()
    parts = corpus.manifest.parts
    for number, part in enumerate(parts):
        name = f"data/train-{number:05d}-of-{len(parts):05d}.parquet"
        durable.link_or_copy(corpus.directory / part.file, folder / name)
        durable.fsync_file(folder / name)
        report.files.append(name)
        report.read += part.rows
        report.rows += part.rows
    durable.fsync_directory(data)
    durable.write_bytes(folder / MANIFEST, (corpus.directory / MANIFEST).read_bytes())
    durable.write_bytes(folder / "README.md", card(corpus).encode())


def card(corpus: Corpus) -> str:
    """The dataset card: front matter that the hub reads, then what the corpus is, in figures."""
    manifest = corpus.manifest
    totals = manifest.totals
    front = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "draft-model"],
        "size_categories": [_size_category(totals["rows"])],
    }
    model = manifest.target.get("name", "not recorded")
    revision = manifest.target.get("revision") or "not pinned"
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).rstrip(),
        "---",
        "",
        f"# Draft-model training corpus for {model}",
        "",
        f"{totals['rows']:,} samples, {totals['tokens']:,} tokens, of which {totals['supervised_tokens']:,} are "
        "supervised: the tokens that the target model itself sampled, as exact ids.",
        "",
        f"- target model: {model}, revision {revision}",
        f"- tokenizer hash: {manifest.target.get('tokenizer_hash', 'not recorded')}",
        f"- chat template hash: {manifest.target.get('template_hash', 'not recorded')}",
        f"- corpus version: {manifest.version} (manifest.json holds the provenance of every shard)",
        "",
        "| dataset | samples | tokens | supervised |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {entry['rows']:,} | {entry['tokens']:,} | {entry['supervised_tokens']:,} |"
            for name, entry in manifest.datasets.items()
        ),
        "",
        "Columns: `id`, `prompt_id`, `dataset`, `input_ids`, `loss_mask` (1 where the target sampled the token, "
        "unshifted, stop token included), `ids_origin`, `outcome`, `messages`, `tools`, `flags`.",
        "",
    ]
    return "\n".join(lines)


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
