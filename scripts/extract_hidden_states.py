"""Ask SGLang for hidden states of corpus samples and store them as safetensors.

Reads:  {training} (the corpus), {target}; what earlier runs have stored in {output}.
Writes: {output}/data (a file per sample) and {output}/manifest.json; --receipt (JSON).
`--plan` only says how large it gets.
"""

import argparse
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.errors import entry
from scripts.lib.hidden_states.choice import choose
from scripts.lib.hidden_states.extract import extract, receipt
from scripts.lib.hidden_states.plan import make_plan, size_line
from scripts.lib.training.reader import Corpus


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="extract_hidden_states", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument("--training", required=True, type=Path, help="link to the current corpus version")
    parser.add_argument("--plan", action="store_true", help="say how large it gets, and do nothing")
    parser.add_argument("--target", type=Path, help="folder that prepare_target wrote")
    parser.add_argument("--output", type=Path, help="folder of the files, taken up again where it was left")
    parser.add_argument("--state", type=Path, help="folder of leases and server logs")
    parser.add_argument("--receipt", type=Path, help="file that tells what this run made")
    options = parser.parse_args(argv)
    config = load_config(*options.config)
    if options.plan:
        plan, chosen = make_plan(config), choose(Corpus(options.training), config.hidden_states)
        print(size_line(plan, len(chosen.tokens), chosen.total))
        return
    for name in ("target", "output", "state"):
        if getattr(options, name) is None:
            parser.error(f"--{name} is needed, except with --plan")
    manifest = extract(
        config,
        options.training,
        options.target,
        options.output,
        options.state,
        say=lambda line: print(f"hidden states: {line}", file=sys.stderr, flush=True),
    )
    if options.receipt:
        durable.write_json(options.receipt, receipt(manifest, options.output))


if __name__ == "__main__":
    sys.exit(main())
