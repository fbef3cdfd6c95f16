"""Add up the validation of all shards; stop the run when too many samples were refused."""

import sys
from pathlib import Path

from rich.console import Console

from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.command import command_line
from scripts.lib.core.errors import entry
from scripts.lib.target.model import load_target
from scripts.lib.validated.statistics import write_token_frequencies
from scripts.lib.validated.summary import print_tables, require_acceptable, summarize


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "target")
    parser.add_argument(
        "--summaries", type=Path, nargs="+", required=True, metavar="FILE", help="what validate_tokens wrote per shard"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file of totals")
    parser.add_argument(
        "--token-frequencies",
        type=Path,
        metavar="FILE",
        help="Parquet file of how often each id occurs, for draft vocabularies",
    )
    arguments = parser.parse_args(argv)
    config = load_config(*arguments.config)
    target = load_target(arguments.target)
    summary = summarize(arguments.summaries)
    print_tables(Console(highlight=False, width=None if sys.stdout.isatty() else 100), summary)
    require_acceptable(summary, config.validation.max_reject_rate)
    if arguments.token_frequencies:
        shards = [path.with_name(durable.read_json(path)["validated"]) for path in arguments.summaries]
        provenance = {"stage": "validated", "target": target.provenance()}
        write_token_frequencies(arguments.token_frequencies, shards, target.vocab_size, provenance)
    durable.write_json(arguments.output, summary)


if __name__ == "__main__":
    sys.exit(main())
