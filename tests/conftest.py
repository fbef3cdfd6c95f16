"""What tests of several folders share."""

from pathlib import Path

import pytest

from scripts.lib.target.model import Target, load_target
from tests import generation


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """The embedded model's target."""
    return generation.target_folder()


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return load_target(target_folder)
