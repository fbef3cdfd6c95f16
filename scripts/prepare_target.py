"""Pin the target model's tokenizer, chat template and facts in one folder."""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import entry
from scripts.lib.target.prepare import prepare_target


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.prepare_target", description=__doc__)
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="configuration files, later over earlier")
    parser.add_argument("--output", type=Path, default=Path("results/target"), help="folder to write")
    arguments = parser.parse_args(argv)
    target = prepare_target(load_config(*arguments.config), arguments.output)
    print(
        f"{target.name}: {target.vocab_size} ids, {target.context_length} tokens of context, "
        f"turns end with {sorted(target.eos_ids)}, {len(target.structural_ids)} structural ids -> {arguments.output}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
