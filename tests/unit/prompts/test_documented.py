"""docs/sources.md names every format, preset, reason and change."""

from typing import get_args

import pytest

from scripts.lib.config.model import Format
from scripts.lib.core.provenance import PROJECT
from scripts.lib.prompts import defects
from scripts.lib.prompts.sources.presets import PRESETS

DOCUMENT = (PROJECT / "docs" / "sources.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", ["DEFECTS", "NOT_USED", "CHANGES"])
def test_reasons(table):
    for name, meaning in getattr(defects, table).items():
        assert f"| `{name}` | {meaning} |" in DOCUMENT


@pytest.mark.parametrize("name", [*PRESETS, *get_args(Format)])
def test_presets_and_formats(name):
    assert f"`{name}`" in DOCUMENT or f"format: {name}`" in DOCUMENT
