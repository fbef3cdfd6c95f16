"""Write the corpus in the format of a trainer.

Reads:  {training} (the corpus), {target} (tokenizer and template, to tell which ids text would give back).
Writes: {output}/ (data files and export.json, which tells what the format could not hold), whole or not at all.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.core.errors import entry
from scripts.lib.exports import FORMATS, export
from scripts.lib.target.model import load_target


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="export_training", description=__doc__.splitlines()[0])
    parser.add_argument("--format", required=True, choices=FORMATS, help="trainer's format; `tokens` is the exact one")
    parser.add_argument("--training", required=True, type=Path, help="link to the current corpus version")
    parser.add_argument("--target", required=True, type=Path, help="folder of the target's tokenizer and template")
    parser.add_argument("--output", required=True, type=Path, help="folder to write, replaced when it is there")
    options = parser.parse_args(argv)
    export(
        options.format,
        options.training,
        load_target(options.target),
        options.output,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    sys.exit(main())
