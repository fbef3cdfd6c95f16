"""Every gate and every flag stands in the docs, once, and means there what it means in the code."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.core.flags import FLAGS
from scripts.lib.validated.gates import GATES, Gates
from scripts.lib.validated.reference import validation_text

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/validation.md"


def test_the_page_is_that_of_the_code():
    assert PAGE.read_text(encoding="utf-8") == validation_text(), "stale: run `make schema`"


@pytest.mark.parametrize("names", [GATES, tuple(FLAGS)], ids=["gates", "flags"])
def test_each_stands_in_its_table_once_with_a_meaning(names: tuple[str, ...]):
    gates, _, flags = PAGE.read_text(encoding="utf-8").partition("## Flags")
    rows = [line.split("|") for line in (gates if names is GATES else flags).splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == list(names)
    assert all(len(row[2].split()) > 2 for row in rows)


def test_every_check_is_a_gate():
    checks = [
        name
        for name in vars(Gates)
        if name.startswith("_") and "seen" in getattr(vars(Gates)[name], "__annotations__", {})
    ]
    differing = sorted(set(checks) ^ {*(f"_{name}" for name in GATES), "_outputs"})
    assert not differing, f"methods of Gates that GATES doesn't name: {', '.join(differing)}"


def raised_flags() -> Iterator[str]:
    """Every text that code of ours puts among flags: `flags.append("x")`, `flags |= {"x"}`, `flags={"x"}`."""
    for path in sorted((ROOT / "scripts/lib").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            values: list[ast.expr] = []
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("add", "append")
            ):
                values = node.args if _named_flags(node.func.value) else []
            elif (isinstance(node, ast.AugAssign) and _named_flags(node.target)) or (
                isinstance(node, ast.keyword) and node.arg == "flags" and isinstance(node.value, ast.Set | ast.List)
            ):
                values = [node.value]
            for value in values:
                for part in ast.walk(value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def _named_flags(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "flags") or (
        isinstance(node, ast.Attribute) and node.attr == "flags"
    )


def test_every_flag_that_is_raised_is_known_and_every_known_one_is_raised():
    raised = Counter(raised_flags())
    assert set(raised) == set(FLAGS)
