"""End the servers of a run on this machine now, instead of some seconds after its last job."""

import argparse
import sys
from pathlib import Path

from scripts.lib.core.errors import entry
from scripts.lib.fleet.stop import stop_servers


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.stop_servers", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the run's state folder, results/state")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait until they are gone")
    arguments = parser.parse_args(argv)
    stop_servers(arguments.state, arguments.patience, lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
