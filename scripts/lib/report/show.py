"""Samples on a screen, with the tokens that the drafter will be trained on marked."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Reject, Sample, columns_of, from_dict, open_parquet
from scripts.lib.core.screen import visible, visible_line
from scripts.lib.target.model import Target

SUPERVISED = "bold green"
MASKED = "dim"
# Marks for output without colours (pipes, NO_COLOR): U+27E6 and U+27E7 don't occur in code or prose.
OPEN, CLOSE = "⟦", "⟧"


def sample_files(path: Path) -> list[Path]:
    """The Parquet files of samples at `path`: a file, or a folder of parts or shards, in name order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(
            f"{path}: no such file or folder: name a Parquet file of samples or a folder such as results/training"
        )
    files = sorted(path.rglob("*.parquet"))
    found = [file for file in files if columns_of(Sample, pq.read_schema(file))]
    if not found:
        raise UserError(f"{path}: holds no Parquet files of samples (stages tokens, validated and training have them)")
    # A folder shows what passed; rejects are shown when their file is named.
    return [file for file in found if not file.name.endswith(".rejects.parquet")] or found


def find_samples(
    paths: Iterable[Path], dataset: str | None, sample_id: str | None, skip: int, number: int
) -> Iterator[Sample]:
    """Yield up to `number` samples after the first `skip` of those that match."""
    return itertools.islice(_matching(paths, dataset, sample_id), skip, skip + number)


def _matching(paths: Iterable[Path], dataset: str | None, sample_id: str | None) -> Iterator[Sample]:
    for file in itertools.chain.from_iterable(map(sample_files, paths)):
        with open_parquet(file, "name one of the stages tokens, validated or training") as parquet:
            rejects = columns_of(Reject, parquet.schema_arrow)
            names = rejects or columns_of(Sample, parquet.schema_arrow)
            if names is None:
                raise UserError(f"{file}: not a file of samples (stages tokens, validated and training have them)")
            for batch in parquet.iter_batches(batch_size=64, columns=names):
                for row in batch.to_pylist():
                    if dataset is not None and row["dataset"] != dataset:
                        continue
                    if sample_id is not None and not row["id"].startswith(sample_id):
                        continue
                    yield from_dict(Reject if rejects else Sample, row)


def spans(sample: Sample) -> Iterator[tuple[int, list[int]]]:
    """Yield (mask value, ids) for every run of equal mask."""
    pairs = zip(sample.loss_mask, sample.input_ids)
    for mask, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield mask, [token for _, token in run]


def heading(sample: Sample) -> str:
    """One line of facts about a sample."""
    supervised = sum(sample.loss_mask)
    parts = [
        sample.id,
        sample.dataset,
        f"{len(sample.input_ids)} tokens, {supervised} supervised",
        f"outcome {sample.outcome}",
        f"ids {sample.ids_origin}",
    ]
    if sample.flags:
        parts.append("flags " + ", ".join(sample.flags))
    if isinstance(sample, Reject):
        parts.append(f"REJECTED by {sample.check}: {sample.detail}")
    return visible_line(" · ".join(parts))


def decoded_text(target: Target, ids: list[int]) -> str:
    """The text of ids; those that no tokenizer knows (rejects may hold them) as `<id 99>`."""
    known = itertools.groupby(ids, key=lambda token: 0 <= token < target.vocab_size)
    return "".join(
        target.decode(list(run)) if decodable else "".join(f"<id {token}>" for token in run) for decodable, run in known
    )


def marked_text(sample: Sample, target: Target, colour: bool) -> Text:
    """The decoded sample: supervised spans bold green, or between ⟦ and ⟧ without colours."""
    text = Text()
    for mask, ids in spans(sample):
        decoded = visible(decoded_text(target, ids))
        if not colour and mask:
            decoded = OPEN + decoded + CLOSE
        text.append(decoded, style=SUPERVISED if mask else MASKED)
    return text


def token_table(sample: Sample, target: Target) -> Table:
    """One row per token: position, id, mask, text."""
    table = Table("position", "id", "mask", "token", box=None, pad_edge=False)
    for position, (token, mask) in enumerate(zip(sample.input_ids, sample.loss_mask)):
        table.add_row(
            str(position),
            str(token),
            str(mask),
            Text(repr(decoded_text(target, [token]))),  # as it is: `[/INST]` is no markup
            style=SUPERVISED if mask else MASKED,
        )
    return table


def show(console: Console, samples: Iterator[Sample], target: Target, ids: bool) -> int:
    """Print samples; returns how many there were."""
    count = 0
    for sample in samples:
        console.print(Text(f"── {heading(sample)}", style="bold"))
        console.print(
            token_table(sample, target) if ids else marked_text(sample, target, console.color_system is not None)
        )
        count += 1
    return count
