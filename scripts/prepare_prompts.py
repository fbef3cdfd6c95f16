"""Read a dataset's sources, clean them, choose prompts, give them stable ids, cut them into shards.

Reads:  the sources of the dataset in --config, --target (folder of prepare_target), --earlier (keys.parquet).
Writes: --output: one Parquet file per shard, keys.parquet, report.json (counts by reason).
"""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line
from scripts.lib.core.errors import entry
from scripts.lib.prompts.prepare import prepare_prompts
from scripts.lib.target.model import load_target


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "dataset", "target")
    parser.add_argument(
        "--earlier", type=Path, nargs="*", default=[], metavar="FILE", help="keys.parquet of datasets with priority"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="where shards, keys and report are written"
    )
    arguments = parser.parse_args(argv)
    prepare_prompts(
        load_config(*arguments.config),
        arguments.dataset,
        load_target(arguments.target),
        arguments.output,
        arguments.earlier,
    )


if __name__ == "__main__":
    sys.exit(main())
