"""Snapshot the current corpus before a merge, verified byte by byte.

Reads:  {training}, the link to the current corpus version.
Writes: {backups}/{time}-{version}/, hard links or copies of the parts; a copy at backup.second_location of the config;
        --receipt (JSON), which says so when there is no corpus.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.errors import entry
from scripts.lib.stores import open_store
from scripts.lib.training.backup import back_up, copy_elsewhere, receipt


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="backup_training", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument("--training", required=True, type=Path, help="link to the current corpus version")
    parser.add_argument("--backups", required=True, type=Path, help="folder of all backups")
    parser.add_argument("--receipt", type=Path, help="file that tells which backup this run made")
    options = parser.parse_args(argv)
    config = load_config(*options.config)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    made = back_up(options.training, options.backups, config.backup.keep, say)
    if made and config.backup.second_location:
        store = open_store(config.backup.second_location, config.upload)
        copy_elsewhere(options.backups, made, store, config.backup.keep, say)
    if options.receipt:
        durable.write_json(options.receipt, receipt(made))


if __name__ == "__main__":
    sys.exit(main())
