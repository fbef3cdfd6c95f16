"""The library's rooms stand in an order: a module imports from rooms further down, and never in a circle."""

import ast
import graphlib
from pathlib import Path

import pytest

from scripts.lib.core.modules import ROOMS

ROOT = Path(__file__).resolve().parents[2]


def module_file(name: str) -> Path | None:
    """The file of a module of ours."""
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports(file: Path) -> set[Path]:
    """Files of ours that one imports, wherever in it the import stands."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    pairs = [(node.module, a.name) for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names]
    found = {module_file(name) for name in names}
    found |= {module_file(f"{module}.{name}") or module_file(str(module)) for module, name in pairs}
    return {one for one in found if one is not None and one.is_relative_to(ROOT / "scripts")} - {file}


IMPORTS = {file: imports(file) for file in sorted((ROOT / "scripts").rglob("*.py"))}


def floor(file: Path) -> int:
    """How far down a file stands: entries are at 0."""
    parts = file.relative_to(ROOT / "scripts").parts
    return ROOMS.index(parts[1]) + 1 if len(parts) > 2 else 0


def test_every_room_has_its_place() -> None:
    rooms = {path.name for path in (ROOT / "scripts/lib").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms == set(ROOMS)


def test_no_arrow_points_up() -> None:
    arrows = [(file, other) for file, others in IMPORTS.items() for other in others]
    wrong = [(file, other) for file, other in arrows if floor(other) < floor(file) or floor(other) == 0]
    assert not [f"{file.relative_to(ROOT)} imports {other.relative_to(ROOT)}" for file, other in wrong]


def test_no_circle() -> None:
    try:
        graphlib.TopologicalSorter(IMPORTS).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(str(file.relative_to(ROOT)) for file in reversed(error.args[1])))


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for file in IMPORTS:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}
