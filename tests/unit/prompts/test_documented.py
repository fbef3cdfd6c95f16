"""docs/sources.md names every format, preset, reason and change, once; every format has a reader."""

import re
from typing import get_args

import pytest

from scripts.lib.config.model import Format
from scripts.lib.core.provenance import PROJECT
from scripts.lib.prompts import defects
from scripts.lib.prompts.sources.formats import FORMATS
from scripts.lib.prompts.sources.presets import PRESETS

DOCUMENT = (PROJECT / "docs" / "sources.md").read_text(encoding="utf-8")


def first_cells(title: str) -> list[str]:
    """The names in the first column of the tables of a section."""
    section = DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_formats_of_the_configuration_are_those_that_can_be_read():
    differing = sorted((set(get_args(Format)) - {"auto"}) ^ FORMATS)
    assert not differing, f"in one of Format (config/model.py) and _READERS (sources/formats.py): {differing}"


def test_formats_stand_in_the_docs_once():
    assert sorted(first_cells("Formats")) == sorted([*FORMATS, "format"]), "docs/sources.md#formats differs"


def test_presets_stand_in_the_docs_once():
    assert sorted(first_cells("Presets")) == sorted([*PRESETS, "preset"])


@pytest.mark.parametrize("table", ["DEFECTS", "NOT_USED", "CHANGES"])
def test_reasons(table):
    for name, meaning in getattr(defects, table).items():
        assert f"| `{name}` | {meaning} |" in DOCUMENT


def test_reasons_stand_in_the_docs_once():
    named = [*defects.DEFECTS, *defects.NOT_USED, *defects.CHANGES]
    assert sorted(first_cells("What happens to a row")) == sorted(named)
    assert len(set(named)) == len(named)
