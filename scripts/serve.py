"""Start the servers and keep them up in the foreground, until Ctrl-C."""

import argparse
import signal
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry
from scripts.lib.fleet.serve import serve


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.serve", description=__doc__)
    parser.add_argument("--config", type=Path, nargs="+", required=True, help="YAML or JSON files, later over earlier")
    parser.add_argument("--target", type=Path, required=True, help="folder of prepare_target, results/target")
    parser.add_argument("--state", type=Path, required=True, help="the run's state folder, results/state")
    arguments = parser.parse_args(argv)
    # Ignored where a script started it in the background, and then nothing but a kill would end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = load_config(*arguments.config)
    serve(config, arguments.target, arguments.state, lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
