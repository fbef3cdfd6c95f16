"""Between ids and turns: what an assistant's ids say.

Everything is decided at ids. The same characters can come from a control token or be typed by the model letter by
letter, and only the ids tell which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.lib.target import Target


@dataclass(frozen=True, slots=True)
class Output:
    """What an assistant's output ids say, split by ids."""

    content: str  # text after the thought, without the stop token
    reasoning: str | None  # text of the thought, without its tags; None when there was none
    reasoning_closed: bool  # False when a thought was begun and its closing tag never came
    tool_ids_seen: tuple[int, ...]  # ids that open tool calls, in order


def split_output(target: "Target", prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Output:
    """Split what the engine sampled into thought and content.

    The thought ends at the first closing id. A template that prefills the opening tag leaves it in the prompt; a
    model that opens the thought itself emits it. A thought that never closes takes everything that follows: nothing
    of a truncated thought becomes content. Line breaks between tag and text belong to the template, which renders
    its own, so they are not part of the texts.
    """
    ids = list(output_ids)
    while ids and ids[-1] in target.eos_ids:
        ids.pop()
    tools = tuple(token for token in output_ids if token in target.tool_ids)
    if target.harmony is not None:
        return _split_harmony(target, ids, tools)
    closing = target.think_close_id
    if closing in ids:
        cut = ids.index(closing)
        thought = _after_opening(target, ids[:cut])
        content = target.decode(ids[cut + 1 :]).lstrip("\n")
        return Output(content, target.decode(thought).strip("\n"), True, tools)
    if thinks_already(target, prompt_ids) or _opens(target, ids):
        thought = _after_opening(target, ids)
        return Output("", target.decode(thought).strip("\n"), False, tools)
    return Output(target.decode(ids), None, True, tools)


def thinks_already(target: "Target", prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside a thought: its last think tag is an opening one with only blanks after it."""
    if target.think_open_id is None:
        return False
    for position in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[position] == target.think_open_id:
            return not target.decode(prompt_ids[position + 1 :]).strip()
        if prompt_ids[position] in target.structural_ids:
            return False
    return False


def _opens(target: "Target", ids: list[int]) -> bool:
    """Whether the output itself begins with the opening tag, blanks aside."""
    if target.think_open_id not in ids:
        return False
    return not target.decode(ids[: ids.index(target.think_open_id)]).strip()


def _after_opening(target: "Target", ids: list[int]) -> list[int]:
    return ids[ids.index(target.think_open_id) + 1 :] if _opens(target, ids) else ids


def _split_harmony(target: "Target", ids: list[int], tools: tuple[int, ...]) -> Output:
    """gpt-oss: `<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>content`.

    The answer is what stands in the channel `final`; every other channel is thought.
    """
    marks = target.harmony
    assert marks is not None
    thought: list[str] = []
    content: list[str] = []
    header: list[int] = []
    body: list[int] | None = None

    def finish() -> None:
        if body is not None:
            channel = target.decode(header).strip().split(" ")[0]
            (content if channel == "final" else thought).append(target.decode(body))

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
    return Output("".join(content), "\n".join(thought) if thought else None, bool(content) or not begun, tools)
