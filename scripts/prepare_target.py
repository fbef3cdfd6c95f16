"""Pin the target model's tokenizer, chat template and facts in one folder."""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.target.prepare import prepare_target


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/target"),
        metavar="FOLDER",
        help="what to write (default: results/target)",
    )
    arguments = parser.parse_args(argv)
    target = prepare_target(load_config(*arguments.config), arguments.output)
    say(
        f"{target.name}: {target.vocab_size} ids, {target.context_length} tokens of context, "
        f"turns end with {sorted(target.eos_ids)}, {len(target.structural_ids)} structural ids -> {arguments.output}"
    )


if __name__ == "__main__":
    sys.exit(main())
