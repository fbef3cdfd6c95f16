"""Ask SGLang for hidden states of corpus samples and store them as safetensors.

Reads:  {training} (the corpus), {target}; what earlier runs have stored in {output}.
Writes: {output}/data (a file per sample) and {output}/manifest.json; --receipt (JSON).
`--plan` only says how large it gets.
"""

import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import entry
from scripts.lib.hidden_states.choice import choose
from scripts.lib.hidden_states.extract import extract, receipt
from scripts.lib.hidden_states.plan import make_plan, size_line
from scripts.lib.training.reader import Corpus


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "training", "target", "state", "receipt")
    parser.add_argument("--plan", action="store_true", help="say how large it gets, and do nothing")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/hidden_states"),
        metavar="FOLDER",
        help="the files, taken up again where they were left (default: results/hidden_states)",
    )
    arguments = parser.parse_args(argv)
    config = load_config(*arguments.config)
    if arguments.plan:
        plan, chosen = make_plan(config), choose(Corpus(arguments.training), config.hidden_states)
        print(size_line(plan, len(chosen.tokens), chosen.total))
        return
    manifest = extract(
        config,
        arguments.training,
        arguments.target,
        arguments.output,
        arguments.state,
        say=lambda line: say(f"hidden states: {line}"),
    )
    if arguments.receipt:
        durable.write_json(arguments.receipt, receipt(manifest, arguments.output))


if __name__ == "__main__":
    sys.exit(main())
