"""Write config/schema.json (for editors) and docs/configuration.md from the configuration's models."""

import argparse
import sys
from pathlib import Path

from scripts.lib import durable
from scripts.lib.config import Config
from scripts.lib.config_reference import reference_text, schema
from scripts.lib.errors import entry


@entry
def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.describe_config", description=__doc__)
    parser.add_argument("--schema", type=Path, default=Path("config/schema.json"), help="JSON schema to write")
    parser.add_argument("--reference", type=Path, default=Path("docs/configuration.md"), help="reference to write")
    arguments = parser.parse_args(argv)
    durable.write_json(arguments.schema, schema())
    durable.write_bytes(arguments.reference, reference_text(Config).encode())


if __name__ == "__main__":
    sys.exit(main())
