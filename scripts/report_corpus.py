"""Write one offline HTML page about a run, finished or not: what it made, what it cost, what is suspicious.

Reads:  --config and everything that lies in --results.
Writes: --output (HTML).
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry
from scripts.lib.report import write_report


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.report_corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder that the run writes to")
    parser.add_argument("--output", type=Path, default=Path("results/report.html"), help="the page to write")
    options = parser.parse_args(argv)
    found = write_report(load_config(*options.config), options.results, options.output)
    for finding in found:
        print(f"{finding.level}: {finding.where}: {finding.text}", file=sys.stderr)
    print(
        f"{options.output}: {len(found)} findings" if found else f"{options.output}: nothing suspicious",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
