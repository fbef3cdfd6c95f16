"""Check a machine before a run: what is wrong, the exact fix, and a kernel compiled as proof."""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line
from scripts.lib.core.errors import entry
from scripts.lib.core.screen import visible
from scripts.lib.doctor.report import examine


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "state")
    parser.add_argument("--config", type=Path, nargs="+", metavar="FILE", help="configuration of the run to check for")
    parser.add_argument(
        "--environment", type=Path, metavar="FOLDER", help="the engine's virtual environment, when not from the config"
    )
    parser.add_argument("--architecture", help="GPU architecture to prove, such as 120f (default: this machine's)")
    parser.add_argument("--fix", action="store_true", help="apply the fixes that only touch the engine's environment")
    arguments = parser.parse_args(argv)
    config = load_config(*arguments.config) if arguments.config else None
    examine(
        config,
        arguments.environment,
        arguments.state,
        arguments.architecture,
        arguments.fix,
        lambda line: print(visible(line), flush=True),
    )


if __name__ == "__main__":
    sys.exit(main())
