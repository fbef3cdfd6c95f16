"""What an assistant's ids say: thought, content, tool calls.

Everything is decided at ids. The same characters can come from a control token or be typed by the model letter by
letter, and only the ids tell which. For example, the ids of `Simple.</think>4.<|im_end|>` after a prompt that ends in
`<think>` have the reasoning "Simple." and the content "4.".
"""

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.lib.core.records import Turn
from scripts.lib.target import turn_format
from scripts.lib.target.model import Target

_TAG_IDS = 32  # ids at the end of a prompt that surely hold a tag which is ordinary text


@dataclass(frozen=True, slots=True)
class Passage:
    """Ids whose text is made when it is asked for: whoever only judges an answer seldom needs it."""

    target: Target
    parts: Sequence[list[int]]  # decoded apart, joined by `glue`
    glue: str = ""
    trim: Callable[[str], str] = str
    whole: bool = False  # `trim` takes more than white space away

    def text(self) -> str:
        return self.trim(self.glue.join([self.target.decode(part) for part in self.parts]))

    def blank(self) -> bool:
        """Whether the text holds nothing but white space, mostly known from the first id."""
        if self.whole:
            return not self.text().strip()
        for part in self.parts:
            for token in part:
                text = self.target.decode((token,))
                if "\ufffd" in text:  # a piece of a character: only all of them together tell
                    return not self.text().strip()
                if text.strip():
                    return False
        return True


class Output:
    """What an assistant's output says, split by ids.

    Attributes:
        content: text after the thought, without the stop token.
        reasoning: text of the thought, without its tags; None when there was none.
        reasoning_closed: False when a thought was begun and its closing tag never came.
        tool_ids_seen: ids that open tool calls, in order.
    """

    __slots__ = ("_content", "_reasoning", "reasoning_closed", "tool_ids_seen")

    def __init__(
        self,
        content: str | Passage,
        reasoning: str | Passage | None,
        reasoning_closed: bool,
        tool_ids_seen: tuple[int, ...],
    ) -> None:
        self._content, self._reasoning = content, reasoning
        self.reasoning_closed, self.tool_ids_seen = reasoning_closed, tool_ids_seen

    @property
    def content(self) -> str:
        return self._content if isinstance(self._content, str) else self._content.text()

    @property
    def reasoning(self) -> str | None:
        return self._reasoning.text() if isinstance(self._reasoning, Passage) else self._reasoning

    @property
    def has_reasoning(self) -> bool:
        """Whether there was a thought, be it an empty one."""
        return self._reasoning is not None

    @property
    def speaks(self) -> bool:
        """Whether the content is more than white space."""
        return not _blank(self._content)

    @property
    def thinks(self) -> bool:
        """Whether the thought is more than white space."""
        return self._reasoning is not None and not _blank(self._reasoning)

    def _all(self) -> tuple:
        return self.content, self.reasoning, self.reasoning_closed, self.tool_ids_seen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Output) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Output({!r}, {!r}, {!r}, {!r})".format(*self._all())


def _blank(text: str | Passage) -> bool:
    return text.blank() if isinstance(text, Passage) else not text.strip()


def _without_first_lines(text: str) -> str:
    return text.lstrip("\n")


def _without_outer_lines(text: str) -> str:
    return text.strip("\n")


def _without_word(word: str, text: str) -> str:
    return text.lstrip().removeprefix(word).strip("\n")


def split_output(target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Output:
    """Split what the engine sampled into thought and content.

    The thought ends at the first closing id. A template that prefills the opening tag leaves it in the prompt; a
    model that opens the thought itself emits it. A thought that never closes takes everything that follows: nothing
    of a truncated thought becomes content. Line breaks between tag and text belong to the template, which renders
    its own, so they are not part of the texts.
    """
    end = len(output_ids)
    while end and output_ids[end - 1] in target.eos_ids:
        end -= 1
    ids = output_ids[:end] if isinstance(output_ids, list) else list(output_ids[:end])
    tools: tuple[int, ...] = ()
    if target.tool_ids and not target.tool_ids.isdisjoint(output_ids):
        tools = tuple(token for token in output_ids if token in target.tool_ids)
    if target.harmony is not None:
        return _split_harmony(target, ids, tools)
    if target.think_texts is not None:
        return _split_text(target, prompt_ids, ids, tools)
    closing = target.think_close_id
    if closing is not None and closing in ids:
        cut = ids.index(closing)
        content = Passage(target, [ids[cut + 1 :]], trim=_without_first_lines)
        return Output(content, _thought(target, ids[:cut]), True, tools)
    if thinks_already(target, prompt_ids) or _opens(target, ids):
        return Output("", _thought(target, ids), False, tools)
    return Output(Passage(target, [ids]), None, True, tools)


def _thought(target: Target, ids: list[int]) -> Passage:
    """The ids before the closing tag, without the opening one and the word that names it (Gemma 4: `thought`)."""
    word = turn_format.of(target).after_open.strip()
    trim = functools.partial(_without_word, word) if word else _without_outer_lines
    return Passage(target, [_after_opening(target, ids)], trim=trim, whole=bool(word))


def _split_text(target: Target, prompt_ids: Sequence[int], ids: list[int], tools: tuple[int, ...]) -> Output:
    """The same for a model whose tags are ordinary text: only those that stand first open a thought."""
    assert target.think_texts is not None
    opening, closing = target.think_texts
    text = target.decode(ids)
    prefilled = target.decode(prompt_ids[-_TAG_IDS:]).rstrip().endswith(opening)
    begun = text.lstrip().startswith(opening)
    if not prefilled and not begun:
        return Output(Passage(target, [ids]), None, True, tools)
    thought, closed, content = (text.lstrip().removeprefix(opening) if begun else text).partition(closing)
    return Output(content.lstrip("\n"), thought.strip("\n"), bool(closed), tools)


def add_text(target: Target, turn: Turn) -> None:
    """Give a turn the text that its ids say, where it has none yet."""
    if turn.content is None:
        output = split_output(target, turn.prompt_ids, turn.output_ids)
        turn.content, turn.reasoning = output.content, output.reasoning


def thought_length(target: Target, ids: Sequence[int]) -> int:
    """Ids of an answer up to the end of its closing tag; 0 when none closes a thought."""
    if target.think_texts is None:
        closing = target.think_close_id
        return list(ids).index(closing) + 1 if closing is not None and closing in ids else 0
    tag = target.think_texts[1]
    if tag not in target.decode(ids):
        return 0
    return bisect.bisect_left(range(len(ids)), True, key=lambda end: tag in target.decode(ids[: end + 1])) + 1


def thinks_already(target: Target, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside a thought: its last think tag is an opening one with only blanks after it."""
    if target.think_open_id is None:
        return False
    for position in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[position] == target.think_open_id:
            return not target.decode(prompt_ids[position + 1 :]).strip()
        if prompt_ids[position] in target.structural_ids:
            return False
    return False


def _opens(target: Target, ids: list[int]) -> bool:
    """Whether the output itself begins with the opening tag, blanks aside."""
    if target.think_open_id is None or target.think_open_id not in ids:
        return False
    return not target.decode(ids[: ids.index(target.think_open_id)]).strip()


def _after_opening(target: Target, ids: list[int]) -> list[int]:
    opening = target.think_open_id
    return ids[ids.index(opening) + 1 :] if opening is not None and _opens(target, ids) else ids


def _split_harmony(target: Target, ids: list[int], tools: tuple[int, ...]) -> Output:
    """gpt-oss: `<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>content`.

    The answer is what stands in the channel `final`; every other channel is thought.
    """
    marks = target.harmony
    assert marks is not None
    thought: list[list[int]] = []
    content: list[list[int]] = []
    header: list[int] = []
    body: list[int] | None = None

    def finish() -> None:
        if body is not None:
            channel = target.decode(header).strip().split(" ")[0]
            (content if channel == "final" else thought).append(body)

    for token in ids:
        if token in (marks["start"], marks["channel"], marks["end"]):
            finish()
            body, header = None, []
        elif token == marks["message"]:
            body = []
        elif body is None:
            header.append(token)
        else:
            body.append(token)
    finish()
    begun = bool(thought) or bool(header)
    reasoning = Passage(target, thought, glue="\n") if thought else None
    return Output(Passage(target, content), reasoning, bool(content) or not begun, tools)
