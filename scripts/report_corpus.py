"""Write one offline HTML page about a run, finished or not: what it made, what it cost, what is suspicious.

Reads:  --config and everything that lies in --results.
Writes: --output (HTML).
"""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.report import write_report


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "results")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/report.html"),
        metavar="FILE",
        help="the page to write (default: results/report.html)",
    )
    arguments = parser.parse_args(argv)
    found = write_report(load_config(*arguments.config), arguments.results, arguments.output)
    for finding in found:
        say(f"{finding.level}: {finding.where}: {finding.text}")
    say(f"{arguments.output}: {len(found)} findings" if found else f"{arguments.output}: nothing suspicious")


if __name__ == "__main__":
    sys.exit(main())
