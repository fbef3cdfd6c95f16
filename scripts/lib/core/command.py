"""The dialect of all entries: `python -m scripts.NAME --config FILE ...`, progress on stderr at once."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from scripts.lib.core.paths import Results
from scripts.lib.core.screen import visible

_RESULTS = Results(Path("results"))


def _folder(default: Path, what: str) -> dict[str, Any]:
    return {"type": Path, "default": default, "metavar": "FOLDER", "help": f"{what} (default: {default})"}


# What several entries ask for, by the same name and with the same default.
_SHARED: dict[str, dict[str, Any]] = {
    "config": {
        "type": Path, "nargs": "+", "required": True, "metavar": "FILE",
        "help": "configuration, YAML or JSON; later files overlay earlier ones",
    },
    "dataset": {"required": True, "metavar": "NAME", "help": "name of the dataset in the configuration"},
    "prompts": {"type": Path, "required": True, "metavar": "FILE", "help": "the shard's prompts"},
    "receipt": {"type": Path, "metavar": "FILE", "help": "JSON file to write that tells what this run made"},
    "results": _folder(_RESULTS.root, "all that the run writes"),
    "target": _folder(_RESULTS.target, "what prepare_target wrote"),
    "training": _folder(_RESULTS.training, "link to the current version of the corpus"),
    "backups": _folder(_RESULTS.backups, "all backups"),
    "state": _folder(_RESULTS.state.folder, "the run's state: journals, progress, leases, logs of servers"),
}  # fmt: skip


def command_line(file: str, description: str | None, *shared: str) -> argparse.ArgumentParser:
    """The parser of the entry `file`, with its docstring as help and the options that it shares with others."""
    parser = argparse.ArgumentParser(
        prog=f"python -m scripts.{Path(file).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in shared:
        parser.add_argument(f"--{name}", **_SHARED[name])
    return parser


def say(line: str) -> None:
    """Tell people on stderr, at once and in one piece: threads don't mix their lines.

    A reader that has gone (tee, a terminal) doesn't stop the work.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{visible(line)}\n")
        sys.stderr.flush()
