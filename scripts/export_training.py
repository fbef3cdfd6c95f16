"""Write the corpus in the format of a trainer.

Reads:  {training} (the corpus), {target} (tokenizer and template, to tell which ids text would give back).
Writes: {output}/ (data files and export.json, which tells what the format could not hold), whole or not at all.
"""

import sys
from pathlib import Path

from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.exports import FORMATS, export
from scripts.lib.target.model import load_target


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "training", "target")
    parser.add_argument("--format", required=True, choices=FORMATS, help="trainer's format; `tokens` is the exact one")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="what to write, replaced when it is there"
    )
    arguments = parser.parse_args(argv)
    export(arguments.format, arguments.training, load_target(arguments.target), arguments.output, say)


if __name__ == "__main__":
    sys.exit(main())
