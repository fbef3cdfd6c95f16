"""Check the corpus against its manifest: every byte, every sample, every field.

Reads:  {training}, or the folder of any version or backup.
Prints: one line per problem, of one kind at most five and how many more there are; exit code 1 when there is one.
"""

import sys

from scripts.lib.core.command import command_line
from scripts.lib.core.errors import UserError, entry
from scripts.lib.core.screen import visible
from scripts.lib.training.verify import verify


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "training")
    arguments = parser.parse_args(argv)
    manifest, problems = verify(arguments.training)
    for problem in problems:
        print(visible(problem))
    if problems:
        raise UserError(f"{arguments.training}: {problems.total} problems: bring a backup back with restore_training")
    print(
        f"{visible(str(arguments.training))}: version {manifest.version} is whole: {manifest.totals['rows']} samples, "
        f"{manifest.totals['tokens']} tokens ({manifest.totals['supervised_tokens']} supervised), {len(manifest.parts)} parts, {len(manifest.datasets)} datasets"
    )


if __name__ == "__main__":
    sys.exit(main())
