"""Merge validated shards, and a base corpus if there is one, into the training corpus.

Reads:  --validated (Parquet shards of samples), --summary (JSON of summarize_validation), merge.base of the config.
Writes: {training} -> corpora/{version}/ (part-*.parquet, manifest.json), swapped in atomically; --receipt (JSON).
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.errors import entry
from scripts.lib.training.merge import merge, receipt


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="merge_training", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument(
        "--validated", nargs="*", default=[], type=Path, metavar="PARQUET", help="validated shards, newest last"
    )
    parser.add_argument("--summary", required=True, type=Path, help="summary.json of the validation of these shards")
    parser.add_argument("--training", required=True, type=Path, help="link to the current corpus version")
    parser.add_argument("--receipt", type=Path, help="file that tells which version this run made")
    options = parser.parse_args(argv)
    manifest = merge(
        load_config(*options.config),
        options.validated,
        durable.read_json(options.summary),
        options.training,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.receipt:
        durable.write_json(options.receipt, receipt(manifest))


if __name__ == "__main__":
    sys.exit(main())
