"""Merge validated shards, and a base corpus if there is one, into the training corpus.

Reads:  --validated (Parquet shards of samples), --summary (JSON of summarize_validation), merge.base of the config.
Writes: {training} -> corpora/{version}/ (part-*.parquet, manifest.json), swapped in atomically; --receipt (JSON).
"""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.training.merge import merge, receipt


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "training", "receipt")
    parser.add_argument(
        "--validated", type=Path, nargs="*", default=[], metavar="FILE", help="validated shards, newest last"
    )
    parser.add_argument(
        "--summary", type=Path, required=True, metavar="FILE", help="what summarize_validation wrote about these shards"
    )
    arguments = parser.parse_args(argv)
    manifest = merge(
        load_config(*arguments.config),
        arguments.validated,
        durable.read_json(arguments.summary),
        arguments.training,
        say,
    )
    if arguments.receipt:
        durable.write_json(arguments.receipt, receipt(manifest))


if __name__ == "__main__":
    sys.exit(main())
