"""Pre-tokenized JSON Lines: `{"input_ids": [...], "loss_mask": [...]}`, the one format that is exact.

SpecForge reads it as `data.prompts_path` (specforge/data/prompt_builder.py), speculators by its two
columns (speculators/data_generation/preprocessing.py, `_passthrough_pretokenized`). Both want
unshifted masks of equal length and no other column.
"""

from pathlib import Path

import pyarrow.compute as pc

from scripts.lib.exports.json_lines import JsonLines
from scripts.lib.exports.report import Report
from scripts.lib.target.model import Target
from scripts.lib.training.reader import Corpus


def export(corpus: Corpus, target: Target, folder: Path, report: Report) -> None:
    """Write ids and masks, verbatim."""
    longest = 0
    with JsonLines(folder, report) as lines:
        for table in corpus.tables(["input_ids", "loss_mask"]):
            longest = max(longest, pc.max(pc.list_value_length(table["input_ids"])).as_py())
            for batch in table.to_batches(max_chunksize=64):
                for ids, mask in zip(batch["input_ids"], batch["loss_mask"]):
                    # NumPy views: a Python object per token would cost five times as much.
                    lines.write({"input_ids": ids.values.to_numpy(), "loss_mask": mask.values.to_numpy()})
                report.read += len(batch)
    report.settings["data.max_length (SpecForge), --seq-length (speculators)"] = longest
