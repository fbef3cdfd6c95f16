"""docs/modules.md: every room and module of the library with its idea, from their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1]

# In the order of their arrows: a room imports from those after it, never from one before (tests/unit/test_rooms.py).
ROOMS = (
    "doctor",
    "report",
    "hidden_states",
    "exports",
    "training",
    "validated",
    "tokens",
    "completions",
    "prompts",
    "client",
    "fleet",
    "engines",
    "target",
    "stores",
    "config",
    "core",
)
_HEAD = """\
# Modules

<!-- Made by `python -m scripts.describe_config` from the modules' docstrings: edit those instead. -->
The library, room by room; a room imports only from those further down.

"""


def idea(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line. Raises ValueError where there is none."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{file}: has no docstring that tells its idea")
    return " ".join(text.split("\n\n")[0].split())


def modules_text() -> str:
    """The page, in Markdown."""
    return _HEAD + "\n".join(line for room in ROOMS for line in _room(LIBRARY / room))


def _room(folder: Path) -> Iterator[str]:
    yield f"## {folder.name}"
    yield idea(folder / "__init__.py")
    yield ""
    yield "| module | idea |"
    yield "|---|---|"
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).with_suffix("").as_posix().removesuffix("/__init__")
        if name != "__init__":
            yield f"| `{name}` | {idea(file).replace('|', chr(92) + '|')} |"
    yield ""
