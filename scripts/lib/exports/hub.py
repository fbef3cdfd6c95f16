"""A Hugging Face `datasets` folder: the corpus' own parts under data/ and a card, ready to push to the hub."""

from pathlib import Path

from scripts.lib.core import durable
from scripts.lib.exports.card import card
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
    durable.write_bytes(folder / "README.md", card(corpus.manifest).encode())
