"""Bring a backup of the corpus back, or list the backups there are.

Reads:  {backups}/{name}/, verified byte by byte before anything changes.
Writes: {training} -> corpora/{version}/, swapped in atomically; the version that was current stays in corpora/.
"""

import sys

from scripts.lib.config.model import Upload
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.stores import open_store
from scripts.lib.training.backup import all_backups, fetch, names_elsewhere, restore, unreadable


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "training", "backups")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--name", help="backup to bring back")
    what.add_argument("--list", action="store_true", help="print the backups there are, oldest first")
    parser.add_argument(
        "--fetch-from", metavar="URL", help="second location of backups: a folder, s3://... or another fsspec URL"
    )
    parser.add_argument(
        "--hard-links", action="store_true", help="share the backup's files instead of copying them: takes no space"
    )
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 endpoint of --fetch-from when it isn't AWS")
    arguments = parser.parse_args(argv)
    elsewhere = None
    if arguments.fetch_from:
        elsewhere = open_store(arguments.fetch_from, Upload(endpoint_url=arguments.endpoint_url))
    if arguments.list and elsewhere:
        print(*names_elsewhere(elsewhere), sep="\n")
        return
    if arguments.list:
        for one in all_backups(arguments.backups):
            print(f"{one.name}  {one.created}  {one.rows} samples  {one.tokens} tokens")
        for problem in unreadable(arguments.backups):
            say(problem)
        return
    if elsewhere:
        fetch(elsewhere, arguments.name, arguments.backups, say)
    restore(arguments.training, arguments.backups, arguments.name, say, arguments.hard_links)


if __name__ == "__main__":
    sys.exit(main())
