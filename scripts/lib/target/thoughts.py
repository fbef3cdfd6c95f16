"""Thoughts in text: the tags that models and sources put around them."""

import re
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


def split_anyhow(text: str, own: Tags) -> tuple[str, str] | None:
    """(thought, what follows it) of a text with the tags `own` or with the usual ones, which a source may have of another
    model; None when there is none that is closed.
    """
    try:
        return split_prefilled(text, own) or split_prefilled(text, TAGS[0]) or split(text)
    except UnclosedThought:
        return None


def split_prefilled(text: str, tags: Tags) -> tuple[str, str] | None:
    """Like `split`, also where the opening tag is missing because the prompt ended with it: `Simple.</think>4.`."""
    opening, closing = tags
    before, closed, _ = text.partition(closing)
    if not closed:
        return None
    if before.lstrip().startswith(opening):
        return split(text, (tags,))
    # Tags in the middle are what the text is about, or follow words of the answer: no thought stands there.
    return None if opening in before else split(opening + text, (tags,))


# `<think>`, `[/THINK]`, `<|channel>`, `<channel|>`, `<seed:think>`, `◁think▷`
MARK = r"[<\[◁][^\s<>\[\]◁▷]{1,40}[>\]▷]"
# What tags around thoughts are called, in part: none of these stands for anything else that answers begin with.
_THINKING = re.compile(
    r"think|thought|reason|reflect|scratch_?pad|monolog|cogitat|deliberat|ponder|rumina|analy[sz]|working_out|^cot$"
)


def name_of(mark: str) -> tuple[str, bool]:
    """(what a mark is called, whether it is a closing one): `</think>` is ("think", True), as `<|end_of_think|>` is."""
    inner = mark[1:-1]
    core = inner.strip("|｜").lower()
    closing = core.startswith("/") or (inner[-1:] in "|｜" and inner[:1] not in "|｜")
    name = core.removeprefix("/")
    for prefix, ends in (("end_of_", True), ("end_", True), ("begin_of_", False), ("begin_", False), ("start_", False)):
        if name.startswith(prefix):
            return name.removeprefix(prefix), closing or ends
    return name, closing


def mirrored(opening: str, marks: Iterable[str]) -> str | None:
    """The closing mark among `marks` that belongs to an opening one; None when there is none."""
    wanted = (name_of(opening)[0], True)
    return next((mark for mark in marks if mark != opening and name_of(mark) == wanted), None)


def named_as_thought(mark: str) -> bool:
    """Whether a mark is called what people call thoughts."""
    return _THINKING.search(name_of(mark)[0]) is not None


def looks_like_thought(text: str) -> bool:
    """Whether a text begins with what somebody's thought may be: a tag of such a name, closed or not.

    Also a token of control of any name that is closed later on: no prose begins so.
    """
    begun = re.match(rf"\s*({MARK})", text)
    if begun is None or name_of(begun[1])[1]:
        return False
    if named_as_thought(begun[1]):
        return True
    return "|" in begun[1] and mirrored(begun[1], re.findall(MARK, text[begun.end() :])) is not None
