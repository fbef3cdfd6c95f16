"""What an assistant's ids say: thought, content, tool calls.

Everything is decided at ids. The same characters can come from a control token or be typed by the model letter by
letter, and only the ids tell which. For example, the ids of `Simple.</think>4.<|im_end|>` after a prompt that ends in
`<think>` have the reasoning "Simple." and the content "4.".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.lib.core.records import Turn
from scripts.lib.target.model import Target


@dataclass(frozen=True, slots=True)
class Passage:
    """Ids whose text is made when it is asked for: whoever only judges an answer seldom needs it."""

    target: Target
    parts: Sequence[list[int]]  # decoded apart, joined by `glue`
    glue: str = ""
    trim: Callable[[str], str] = str

    def text(self) -> str:
        return self.trim(self.glue.join([self.target.decode(part) for part in self.parts]))

    def blank(self) -> bool:
        """Whether the text holds nothing but white space, mostly known from the first id."""
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
    ids = list(output_ids[:end])
    tools: tuple[int, ...] = ()
    if target.tool_ids and not target.tool_ids.isdisjoint(output_ids):
        tools = tuple(token for token in output_ids if token in target.tool_ids)
    if target.harmony is not None:
        return _split_harmony(target, ids, tools)
    closing = target.think_close_id
    if closing is not None and closing in ids:
        cut = ids.index(closing)
        thought = Passage(target, [_after_opening(target, ids[:cut])], trim=_without_outer_lines)
        content = Passage(target, [ids[cut + 1 :]], trim=_without_first_lines)
        return Output(content, thought, True, tools)
    if thinks_already(target, prompt_ids) or _opens(target, ids):
        thought = Passage(target, [_after_opening(target, ids)], trim=_without_outer_lines)
        return Output("", thought, False, tools)
    return Output(Passage(target, [ids]), None, True, tools)


def add_text(target: Target, turn: Turn) -> None:
    """Give a turn the text that its ids say, where it has none yet."""
    if turn.content is None:
        output = split_output(target, turn.prompt_ids, turn.output_ids)
        turn.content, turn.reasoning = output.content, output.reasoning


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
    return ids[ids.index(target.think_open_id) + 1 :] if _opens(target, ids) else ids


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
