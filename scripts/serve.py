"""Start the servers and keep them up in the foreground, until Ctrl-C."""

import signal
import sys

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.fleet.serve import serve


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "target", "state")
    arguments = parser.parse_args(argv)
    # Ignored where a script started it in the background, and then nothing but a kill would end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(load_config(*arguments.config), arguments.target, arguments.state, say)


if __name__ == "__main__":
    sys.exit(main())
