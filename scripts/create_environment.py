"""Make the virtual environment of an inference server from its lock in envs/."""

import sys
from pathlib import Path

from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.doctor.toolkit import mend_libraries
from scripts.lib.engines.environment import create_environment, lock_environment, names


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--name", help=f"which one: {', '.join(names())}")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to make it, such as .venvs/sglang")
    parser.add_argument("--lock", metavar="NAME", help="instead: resolve envs/NAME.in into envs/NAME.txt")
    arguments = parser.parse_args(argv)
    if arguments.lock:
        lock_environment(arguments.lock, say)
    elif arguments.name and arguments.output:
        create_environment(arguments.name, arguments.output, say, lambda folder: mend_libraries(folder, say))
    else:
        parser.error("needs --name and --output, or --lock")


if __name__ == "__main__":
    sys.exit(main())
