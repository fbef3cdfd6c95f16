"""Write what is made from the code: config/schema.json (for editors), config/progress.schema.json, docs/configuration.md,
docs/validation.md and docs/modules.md."""

import sys
from pathlib import Path

from scripts.lib.completions import progress
from scripts.lib.config.model import Config
from scripts.lib.config.reference import reference_text, schema
from scripts.lib.core import durable
from scripts.lib.core.command import command_line
from scripts.lib.core.errors import entry
from scripts.lib.core.modules import modules_text
from scripts.lib.validated.reference import validation_text


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--schema", type=Path, default=Path("config/schema.json"), metavar="FILE", help="JSON schema")
    parser.add_argument(
        "--reference", type=Path, default=Path("docs/configuration.md"), metavar="FILE", help="reference for people"
    )
    parser.add_argument(
        "--progress",
        type=Path,
        default=Path("config/progress.schema.json"),
        metavar="FILE",
        help="JSON schema of progress.json",
    )
    parser.add_argument(
        "--validation", type=Path, default=Path("docs/validation.md"), metavar="FILE", help="gates and flags for people"
    )
    parser.add_argument(
        "--modules", type=Path, default=Path("docs/modules.md"), metavar="FILE", help="rooms and modules for people"
    )
    arguments = parser.parse_args(argv)
    durable.write_json(arguments.schema, schema())
    durable.write_bytes(arguments.reference, reference_text(Config).encode())
    durable.write_json(arguments.progress, progress.schema())
    durable.write_bytes(arguments.validation, validation_text().encode())
    durable.write_bytes(arguments.modules, modules_text().encode())


if __name__ == "__main__":
    sys.exit(main())
