"""Ids of an answer of which only the text is known: hosted APIs give no more.

For example, the text "4." of a Qwen3 model that doesn't think becomes the ids of `4.<|im_end|>`.
"""

from collections.abc import Sequence

from scripts.lib.core.records import Message
from scripts.lib.target import turn_format
from scripts.lib.target.model import Target


def reconstruct(
    target: Target,
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
    form = turn_format.of(target)
    message = form.apart(Message("assistant", content, reasoning, tool_calls))
    # Only the last control token of the prompt and the blanks after it matter: whether it opens a thought.
    text, _ = form.write(target, target.decode(prompt_ids[-8:]), message, finished=finish_reason != "length")
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
