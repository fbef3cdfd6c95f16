"""Lists of choices in the shapes of public benchmarks; what is none is left alone."""

import pytest

from scripts.lib.prompts.sources.choices import choices_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["Trout", "Owl"], "A. Trout\nB. Owl"),
        (["A) 21", "B) 22"], "A) 21\nB) 22"),
        (["(a) red", "(b) blue"], "(a) red\n(b) blue"),
        ({"text": ["Trout", "Owl"], "label": ["1", "2"]}, "1. Trout\n2. Owl"),
        ({"A": "Trout", "B": "Owl", "C": None}, "A. Trout\nB. Owl"),
        ([{"label": "A", "text": "Trout"}, {"label": "B", "text": "Owl"}], "A. Trout\nB. Owl"),
        ([{"key": "A", "value": "Trout"}], "A. Trout"),
        ("a ) 1 , b ) 2", "a ) 1 , b ) 2"),
        ('["Trout", "Owl"]', "A. Trout\nB. Owl"),
        ("{'A': 'Trout', 'B': 'Owl'}", "A. Trout\nB. Owl"),
        ("[1] or [2]", "[1] or [2]"),
        (" ", None),
        ([], None),
        (None, None),
        ([{"message": {"role": "assistant"}, "index": 0}], None),
        ({"temperature": "0.7"}, None),
        ({"text": ["Trout"], "label": ["A", "B"]}, None),
        ([1, 2], None),
        (["word"] * 27, None),
    ],
)
def test_choices(value, text):
    assert choices_text(value) == text
