"""Print samples with their supervised tokens marked."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from scripts.lib.core.errors import UserError, entry
from scripts.lib.report.show import find_samples, show
from scripts.lib.target.model import load_target


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.show", description=__doc__)
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("results/training"), help="corpus, stage folder or Parquet file"
    )
    parser.add_argument(
        "--target", type=Path, default=Path("results/target"), help="folder with the target's tokenizer"
    )
    parser.add_argument("--dataset", help="only samples of this dataset")
    parser.add_argument("--id", help="only samples whose id starts with this")
    parser.add_argument("--skip", type=int, default=0, help="pass over so many samples first")
    parser.add_argument("--number", "-n", type=int, default=3, help="how many samples to print")
    parser.add_argument("--ids", action="store_true", help="one line per token: position, id, mask, text")
    arguments = parser.parse_args(argv)
    target = load_target(arguments.target)
    samples = find_samples(arguments.path, arguments.dataset, arguments.id, arguments.skip, arguments.number)
    if not show(Console(highlight=False, soft_wrap=True), samples, target, arguments.ids):
        if arguments.dataset or arguments.id or arguments.skip:
            raise UserError(f"{arguments.path}: no sample matches")
        print(f"{arguments.path}: holds no samples")


if __name__ == "__main__":
    sys.exit(main())
