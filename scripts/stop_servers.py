"""End the servers of a run on this machine now, instead of some seconds after its last job."""

import sys

from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.fleet.stop import stop_servers


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "state")
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long to wait until they are gone (default: 60)",
    )
    arguments = parser.parse_args(argv)
    stop_servers(arguments.state, arguments.patience, say)


if __name__ == "__main__":
    sys.exit(main())
