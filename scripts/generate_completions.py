"""The target answers the prompts of one shard of a class-B dataset.

Reads:  {target}, {prompts}; what earlier runs of this shard have journalled in {state}.
Writes: {output}, one terminal outcome per prompt; progress to stderr, {state}/progress and progress.json beside {state}.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.completions.generate import generate
from scripts.lib.completions.job import ShardJob
from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="generate_completions", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument("--dataset", required=True, help="name of the dataset, as in the configuration")
    parser.add_argument("--shard", required=True, help="number of the shard, such as 000")
    parser.add_argument("--target", required=True, type=Path, help="folder that prepare_target wrote")
    parser.add_argument("--prompts", required=True, type=Path, help="the shard's prompts")
    parser.add_argument(
        "--output", required=True, type=Path, help="the shard's completions, written when all are there"
    )
    parser.add_argument("--state", required=True, type=Path, help="folder of journals, budgets, progress and leases")
    options = parser.parse_args(argv)
    generate(
        ShardJob(
            config=load_config(*options.config),
            dataset=options.dataset,
            shard=options.shard,
            target=options.target,
            prompts=options.prompts,
            output=options.output,
            state=options.state,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
