"""Snapshot the current corpus before a merge, verified byte by byte.

Reads:  {training}, the link to the current corpus version.
Writes: {backups}/{time}-{version}/, copies of the parts (hard links with backup.hard_links); a copy at backup.second_location of the config;
        --receipt (JSON), which says so when there is no corpus.
"""

import sys

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.stores import open_store
from scripts.lib.training.backup import back_up, copy_elsewhere, receipt


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "training", "backups", "receipt")
    arguments = parser.parse_args(argv)
    config = load_config(*arguments.config)
    settings = config.backup
    made = back_up(arguments.training, arguments.backups, settings.keep, say, hard_links=settings.hard_links)
    if made and settings.second_location:
        store = open_store(settings.second_location, config.upload)
        copy_elsewhere(arguments.backups, made, store, settings.keep, say)
    if arguments.receipt:
        durable.write_json(arguments.receipt, receipt(made))


if __name__ == "__main__":
    sys.exit(main())
