"""The target answers the prompts of one shard of a class-B dataset.

Reads:  {target}, {prompts}; what earlier runs of this shard have journalled in {state}.
Writes: {output}, one terminal outcome per prompt; progress to stderr, {state}/progress and progress.json beside {state}.
"""

import sys
from pathlib import Path

from scripts.lib.completions.generate import generate
from scripts.lib.completions.job import ShardJob
from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line
from scripts.lib.core.errors import entry


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "dataset", "target", "prompts", "state")
    parser.add_argument("--shard", required=True, metavar="NUMBER", help="number of the shard, such as 000")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the shard's completions, written when all are there"
    )
    arguments = parser.parse_args(argv)
    generate(
        ShardJob(
            config=load_config(*arguments.config),
            dataset=arguments.dataset,
            shard=arguments.shard,
            target=arguments.target,
            prompts=arguments.prompts,
            output=arguments.output,
            state=arguments.state,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
