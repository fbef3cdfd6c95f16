"""docs/validation.md: every gate and every flag, from the code that has them."""

import inspect

from scripts.lib.core.flags import FLAGS
from scripts.lib.validated.gates import GATES, Gates

_HEAD = """# Validation

<!-- Made by `python -m scripts.describe_config`: edit the docstrings of scripts/lib/validated/gates.py and
scripts/lib/core/flags.py instead. -->
Stage 4 looks at every sample before it may enter the corpus.
What is refused lies beside the others with its reason (`results/validated/{dataset}/{shard}.rejects.parquet`; read it with `python -m scripts.show FILE`), and more than `validation.max_reject_rate` of a dataset stops the run.

## Gates
Tried in this order; a sample is refused by the first one that it fails, so that the counts add up.
Ready tokens (`ids_origin: given`) come with conventions of their own and pass the gates on turns and texts unseen.

| gate | refuses |
|---|---|
"""
_FLAGS = """
## Flags
A flag is a suspicion: the sample stays in the corpus, its flags are counted in the summary of its shard (`statistics.flags`), in `validated/summary.json` and in the report.

| flag | meaning |
|---|---|
"""


def validation_text() -> str:
    """The page."""
    gates = [f"| `{name}` | {_refuses(name)} |" for name in GATES]
    flags = [f"| `{name}` | {meaning} |" for name, meaning in FLAGS.items()]
    return _HEAD + "\n".join(gates) + "\n" + _FLAGS + "\n".join(flags) + "\n"


def _refuses(gate: str) -> str:
    text = (inspect.getdoc(getattr(Gates, f"_{gate}")) or "").split("\n")[0].rstrip(".")
    return text[:1].lower() + text[1:]
