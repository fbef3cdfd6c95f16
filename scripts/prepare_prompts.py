"""Read a dataset's sources, clean them, choose prompts, give them stable ids, cut them into shards.

Reads:  the sources of the dataset in --config, --target (folder of prepare_target), --earlier (keys.parquet).
Writes: --output: one Parquet file per shard, keys.parquet, report.json (counts by reason).
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry
from scripts.lib.prompts.prepare import prepare_prompts
from scripts.lib.target.model import load_target


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.prepare_prompts", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument("--dataset", required=True, metavar="NAME", help="name of the dataset in the config")
    parser.add_argument("--target", required=True, type=Path, metavar="DIR", help="folder that prepare_target wrote")
    parser.add_argument(
        "--earlier", nargs="*", default=[], type=Path, metavar="FILE", help="keys.parquet of datasets with priority"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for shards, keys and report")
    options = parser.parse_args(argv)
    prepare_prompts(
        load_config(*options.config), options.dataset, load_target(options.target), options.output, options.earlier
    )


if __name__ == "__main__":
    sys.exit(main())
