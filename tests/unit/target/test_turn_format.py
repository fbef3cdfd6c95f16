"""How each family's model writes a turn, learned from its template."""

import pytest

from scripts.lib.core.records import Message
from scripts.lib.target import turn_format
from tests.families import FAMILIES, target

WITH_TAGS = [name for name, family in FAMILIES.items() if family.written is not None and name != "gpt-oss"]


@pytest.mark.parametrize("name", WITH_TAGS)
def test_thoughts_in_content_are_split_once(name: str):
    model = target(name)
    message = Message("assistant", "<think>\nSimple.\n</think>\n\n4. </think>")
    split = turn_format.of(model).apart(message)
    assert split == Message("assistant", "4. </think>", "Simple.")
    assert turn_format.of(model).apart(split) is split
    user = Message("user", "<think>x</think>")
    assert turn_format.of(model).apart(user) is user
