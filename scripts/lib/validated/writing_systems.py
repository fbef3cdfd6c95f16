"""Which writing systems a text uses, by Unicode's Script property."""

from collections.abc import Iterator
from functools import lru_cache

import regex

# The scripts of living languages with much text; letters of any other count as `Other`.
SCRIPTS = (
    "Latin", "Han", "Hiragana", "Katakana", "Hangul", "Cyrillic", "Arabic", "Devanagari", "Greek", "Hebrew", "Thai",
    "Bengali", "Tamil", "Telugu", "Gujarati", "Gurmukhi", "Kannada", "Malayalam", "Sinhala", "Myanmar", "Khmer", "Lao",
    "Tibetan", "Georgian", "Armenian", "Ethiopic", "Mongolian",
)  # fmt: skip


@lru_cache(maxsize=1)
def _pattern() -> regex.Pattern:
    groups = [rf"(?P<{name}>[\p{{L}}&&\p{{Script={name}}}]+)" for name in SCRIPTS]
    # Letters of no script of their own, such as U+30FC, go with any neighbour: they are not counted.
    return regex.compile("|".join([*groups, r"(?P<Other>[\p{L}--\p{Script=Common}--\p{Script=Inherited}])"]), regex.V1)


def letters_by_script(text: str) -> dict[str, int]:
    """Number of letters per script; digits, punctuation and symbols belong to none."""
    counts: dict[str, int] = {}
    for script, length in _runs(text):
        counts[script] = counts.get(script, 0) + length
    return counts


def _runs(text: str) -> Iterator[tuple[str, int]]:
    for match in _pattern().finditer(text):
        assert match.lastgroup is not None
        yield match.lastgroup, match.end() - match.start()
