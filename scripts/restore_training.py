"""Bring a backup of the corpus back, or list the backups there are.

Reads:  {backups}/{name}/, verified byte by byte before anything changes.
Writes: {training} -> corpora/{version}/, swapped in atomically; the version that was current stays in corpora/.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.model import Upload
from scripts.lib.core.errors import entry
from scripts.lib.stores import open_store
from scripts.lib.training.backup import all_backups, fetch, names_elsewhere, restore


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="restore_training", description=__doc__.splitlines()[0])
    parser.add_argument("--training", required=True, type=Path, help="link to the current corpus version")
    parser.add_argument("--backups", required=True, type=Path, help="folder of all backups")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--name", help="backup to bring back")
    what.add_argument("--list", action="store_true", help="print the backups there are, oldest first")
    parser.add_argument(
        "--fetch-from", metavar="URL", help="second location of backups: a folder, s3://... or another fsspec URL"
    )
    parser.add_argument("--endpoint-url", help="S3 endpoint of --fetch-from when it isn't AWS")
    options = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    elsewhere = (
        open_store(options.fetch_from, Upload(endpoint_url=options.endpoint_url)) if options.fetch_from else None
    )
    if options.list and elsewhere:
        print(*names_elsewhere(elsewhere), sep="\n")
        return
    if options.list:
        for one in all_backups(options.backups):
            print(f"{one.name}  {one.created}  {one.rows} samples  {one.tokens} tokens")
        return
    if elsewhere:
        fetch(elsewhere, options.name, options.backups, say)
    restore(options.training, options.backups, options.name, say)


if __name__ == "__main__":
    sys.exit(main())
