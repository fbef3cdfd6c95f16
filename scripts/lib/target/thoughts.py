"""Thoughts in text: the tags that models and sources put around them."""

from collections.abc import Iterable

Tags = tuple[str, str]  # opening, closing

# The usual ones first. As tokens of a vocabulary (`control_tokens`) or typed out by models that have no such tokens.
TAGS: tuple[Tags, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


class UnclosedThought(ValueError):
    """A text opens a thought and never closes it."""


def split(text: str, tags: Iterable[Tags] = TAGS) -> tuple[str, str] | None:
    """(thought, what follows it) of a text that begins with a thought; None when it doesn't.

    Blank lines at the tags are nobody's: templates that render them put their own. For example,
    `<think>\\nSimple.\\n</think>\\n\\n4.` gives ("Simple.", "4."). Raises UnclosedThought.
    """
    begun = text.lstrip()
    for opening, closing in tags:
        if begun.startswith(opening):
            thought, closed, rest = begun.removeprefix(opening).partition(closing)
            if not closed:
                raise UnclosedThought(f"{opening} without {closing}")
            return thought.strip("\n"), rest.lstrip("\n")
    return None


def split_prefilled(text: str, tags: Tags) -> tuple[str, str] | None:
    """Like `split`, also where the opening tag is missing because the prompt ended with it: `Simple.</think>4.`."""
    opening, closing = tags
    if closing not in text:
        return None
    return split(text if text.lstrip().startswith(opening) else opening + text, (tags,))
