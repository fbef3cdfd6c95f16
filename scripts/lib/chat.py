"""Between ids and turns: what an assistant's ids say.

Everything is decided at ids. The same characters can come from a control token or be typed by the model letter by
letter, and only the ids tell which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.lib import turn_format
from scripts.lib.records import Message

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
    tools: tuple[int, ...] = ()
    if not target.tool_ids.isdisjoint(output_ids):
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


def with_split_thought(target: "Target", message: Message) -> Message:
    """An assistant message whose thought stands in its content between tags, with the thought in its own field.

    For ready conversations only, where nothing but text is known. `...</think>answer`, without the opening tag that
    some templates prefill, is understood as well.
    """
    opening, closing = turn_format.of(target).open, turn_format.of(target).close
    if message.role != "assistant" or message.reasoning is not None or not closing or closing not in message.content:
        return message
    thought, _, content = message.content.partition(closing)
    thought = thought.lstrip().removeprefix(opening).strip("\n")
    return Message("assistant", content.lstrip("\n"), thought, message.tool_calls)


def reconstruct(
    target: "Target",
    prompt_ids: Sequence[int],
    content: str,
    reasoning: str | None,
    finish_reason: str,
    tool_calls: str | None = None,
) -> list[int]:
    """Ids of an answer of which an engine returned only the text: a good guess, never the truth.

    The same text can be sampled as other ids, and servers strip blanks around thought and content. Samples made from
    this are labelled `ids_origin: reconstructed`; `validate` measures on rows with known ids how often it is wrong.
    `tool_calls` is the JSON text of an OpenAI-style list. Raises TurnFormat's NotWritable (a ValueError) for a message
    that the target's format has no place for, TemplateError for text that isn't Unicode.
    """
    message = Message("assistant", content, reasoning, tool_calls)
    # Only the last control token of the prompt and the blanks after it matter: whether it opens a thought.
    text, _ = turn_format.of(target).write(
        target, target.decode(prompt_ids[-8:]), message, finished=finish_reason != "length"
    )
    return target.encode(text)


def reconstruction_flags(
    ids: Sequence[int], content: str, reasoning: str | None, completion_tokens: int | None
) -> list[str]:
    """Signs that reconstructed ids are not those that were sampled; `completion_tokens` is the API's own count."""
    flags = []
    if completion_tokens is not None and completion_tokens != len(ids):
        flags.append("length_mismatch")
    if "\ufffd" in content or "\ufffd" in (reasoning or ""):
        flags.append("replacement_character")  # the text lost bytes: its ids can't come back
    if content != content.strip() or (reasoning is not None and reasoning != reasoning.strip()):
        flags.append("outer_blanks")
    return flags
