"""Check a shard of samples against named gates; keep the rejects with their reasons."""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.target.model import load_target
from scripts.lib.validated.validate import ShardFiles, validate_tokens


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "dataset", "target", "prompts")
    parser.add_argument(
        "--completions", type=Path, nargs="?", metavar="FILE", help="completions of the shard; none for class A"
    )
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="samples of the shard")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="samples that passed, to write")
    parser.add_argument("--rejects", type=Path, required=True, metavar="FILE", help="the refused ones, to write")
    parser.add_argument("--summary", type=Path, required=True, metavar="FILE", help="JSON file of counts to write")
    arguments = parser.parse_args(argv)
    files = ShardFiles(
        arguments.dataset,
        arguments.prompts,
        arguments.completions,
        arguments.tokens,
        arguments.output,
        arguments.rejects,
        arguments.summary,
    )
    summary = validate_tokens(load_config(*arguments.config), load_target(arguments.target), files)
    refused = ", ".join(f"{check} {count}" for check, count in summary["rejects"].items())
    say(f"{summary['passed']} of {summary['samples']} samples passed" + (f" (refused: {refused})" if refused else ""))


if __name__ == "__main__":
    sys.exit(main())
