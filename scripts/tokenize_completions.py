"""Turn a shard of completions (class B) into training samples."""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.target.model import load_target
from scripts.lib.tokens.completions import tokenize_completions


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "dataset", "target", "prompts")
    parser.add_argument("--completions", type=Path, required=True, metavar="FILE", help="completions of the same shard")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="samples to write")
    arguments = parser.parse_args(argv)
    counts = tokenize_completions(
        load_config(*arguments.config),
        arguments.dataset,
        load_target(arguments.target),
        arguments.prompts,
        arguments.completions,
        arguments.output,
    )
    say(f"{counts['samples']} samples from {counts['prompts']} prompts -> {arguments.output}")


if __name__ == "__main__":
    sys.exit(main())
