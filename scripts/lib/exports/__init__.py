"""The corpus in the formats of trainers. One module per family; `FORMATS` names them all.

An export is a folder: data/ is what the trainer is pointed at, and export.json tells what the format
could not hold: rows left out by reason, facts lost by name, and the trainer's settings that fit the
rows. (Trainers load every JSON file of a folder, so the report lies beside the data.)
"""

from collections.abc import Callable
from pathlib import Path

from scripts.lib.core import durable
from scripts.lib.exports import conversations, hub, sharegpt, tokens
from scripts.lib.exports.report import Report
from scripts.lib.target.model import Target
from scripts.lib.training import versions
from scripts.lib.training.reader import Corpus

Export = Callable[[Corpus, Target, Path, Report], None]

FORMATS: dict[str, Export] = {
    "tokens": tokens.export,
    **{name: dialect.export for name, dialect in conversations.DIALECTS.items()},
    "eagle": sharegpt.export,
    "datasets": hub.export,
}


def export(name: str, training: Path, target: Target, output: Path, say: Callable[[str], None]) -> Report:
    """Write the corpus in format `name` to the folder `output`, whole or not at all.

    Raises UserError when the corpus is missing or its tokenizer is not the target's.
    """
    corpus = Corpus(training)
    corpus.require_tokenizer(target, "export it with the target that made it")
    report = Report(format=name, version=corpus.manifest.version)
    output.parent.mkdir(parents=True, exist_ok=True)
    size = sum(part.bytes for part in corpus.manifest.parts)
    # JSON spells out what Parquet packs: about six bytes a token, and text without compression.
    needed = size if name == "datasets" else 4 * size + 6 * corpus.manifest.totals["tokens"]
    durable.require_free_space(output.parent, needed, f"the export to {name}")
    with versions.staging(output, replace=True) as folder:
        FORMATS[name](corpus, target, folder, report)
        durable.write_json(folder / "export.json", report.as_json())
    for line in report.lines():
        say(f"export {name}: {line}")
    return report
