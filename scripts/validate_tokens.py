"""Check a shard of samples against named gates; keep the rejects with their reasons."""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry
from scripts.lib.target.model import load_target
from scripts.lib.validated.validate import ShardFiles, validate_tokens


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.validate_tokens", description=__doc__)
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="configuration files, later over earlier")
    parser.add_argument("--dataset", required=True, help="name of the dataset in the configuration")
    parser.add_argument("--target", type=Path, default=Path("results/target"), help="folder that prepare_target wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt shard")
    parser.add_argument("--completions", nargs="?", type=Path, help="completions of the shard; none for class A")
    parser.add_argument("--tokens", type=Path, required=True, help="samples of the shard")
    parser.add_argument("--output", type=Path, required=True, help="Parquet file of the samples that passed")
    parser.add_argument("--rejects", type=Path, required=True, help="Parquet file of the refused ones")
    parser.add_argument("--summary", type=Path, required=True, help="JSON file of counts")
    arguments = parser.parse_args(argv)
    shard = ShardFiles(
        arguments.dataset,
        arguments.prompts,
        arguments.completions,
        arguments.tokens,
        arguments.output,
        arguments.rejects,
        arguments.summary,
    )
    summary = validate_tokens(load_config(*arguments.config), load_target(arguments.target), shard)
    refused = ", ".join(f"{check} {count}" for check, count in summary["rejects"].items())
    print(
        f"{summary['passed']} of {summary['samples']} samples passed" + (f" (refused: {refused})" if refused else ""),
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
