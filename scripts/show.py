"""Print samples with their supervised tokens marked."""

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from scripts.lib.core.command import command_line
from scripts.lib.core.errors import UserError, entry
from scripts.lib.core.screen import visible
from scripts.lib.report.show import find_samples, show
from scripts.lib.target.model import load_target


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a number from `least` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more")
        return value

    return number


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "target")
    parser.add_argument(
        "paths",
        type=Path,
        nargs="*",
        default=[Path("results/training")],
        metavar="PATH",
        help="corpus, stage folder or Parquet files (default: results/training)",
    )
    parser.add_argument("--dataset", metavar="NAME", help="only samples of this dataset")
    parser.add_argument("--id", metavar="START", help="only samples whose id starts with this")
    parser.add_argument("--skip", type=at_least(0), default=0, metavar="N", help="pass over so many samples first")
    parser.add_argument(
        "--number", "-n", type=at_least(1), default=3, metavar="N", help="how many to print (default: 3)"
    )
    parser.add_argument("--ids", action="store_true", help="one line per token: position, id, mask, text")
    arguments = parser.parse_args(argv)
    if not arguments.target.is_dir():
        raise UserError(
            f"{arguments.target}: nothing has run yet: `snakemake --cores 8 merge_training` makes the corpus"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows few characters shows the others so
    target = load_target(arguments.target)
    samples = find_samples(arguments.paths, arguments.dataset, arguments.id, arguments.skip, arguments.number)
    if not show(Console(highlight=False, soft_wrap=True), samples, target, arguments.ids):
        where = ", ".join(map(str, arguments.paths))
        if arguments.dataset or arguments.id or arguments.skip:
            raise UserError(f"{where}: no sample matches")
        print(f"{visible(where)}: holds no samples")


if __name__ == "__main__":
    sys.exit(main())
