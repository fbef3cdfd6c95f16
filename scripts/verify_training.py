"""Check the corpus against its manifest: every byte, every sample, every count.

Reads:  {training}, or the folder of any version or backup.
Prints: one line per problem; exit code 1 when there is one.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.core.errors import UserError, entry
from scripts.lib.training.manifest import verify


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="verify_training", description=__doc__.splitlines()[0])
    parser.add_argument("--training", required=True, type=Path, help="link to the current version, or any version")
    options = parser.parse_args(argv)
    manifest, problems = verify(options.training)
    for problem in problems:
        print(problem)
    if problems:
        raise UserError(f"{options.training}: {len(problems)} problems: bring a backup back with restore_training")
    print(
        f"{options.training}: version {manifest.version} is whole: {manifest.totals['rows']} samples, "
        f"{manifest.totals['tokens']} tokens ({manifest.totals['supervised_tokens']} supervised), {len(manifest.parts)} parts, {len(manifest.datasets)} datasets"
    )


if __name__ == "__main__":
    sys.exit(main())
