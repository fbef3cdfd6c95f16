"""Turn a shard of completions (class B) into training samples."""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry
from scripts.lib.target.model import load_target
from scripts.lib.tokens.completions import tokenize_completions


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.tokenize_completions", description=__doc__)
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="configuration files, later over earlier")
    parser.add_argument("--dataset", required=True, help="name of the dataset in the configuration")
    parser.add_argument("--target", type=Path, default=Path("results/target"), help="folder that prepare_target wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt shard")
    parser.add_argument("--completions", type=Path, required=True, help="completions of the same shard")
    parser.add_argument("--output", type=Path, required=True, help="Parquet file of samples to write")
    arguments = parser.parse_args(argv)
    counts = tokenize_completions(
        load_config(*arguments.config),
        arguments.dataset,
        load_target(arguments.target),
        arguments.prompts,
        arguments.completions,
        arguments.output,
    )
    print(f"{counts['samples']} samples from {counts['prompts']} prompts -> {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
