"""Conversations of marked words, from whose renderings the forms of a template are learned."""

from collections.abc import Iterator, Sequence

from scripts.lib.core.records import Message
from scripts.lib.target.model import Target

ASK = Message("user", "Qm1")
# Words that no template contains, without blanks at the ends (some templates trim).
THOUGHT, CONTENT, NAME, RESULT = "Thoughtm2", "Contentm3", "NAMEm6", "Resultm4"
CALL = '[{"id":"functions.NAMEm6:0","type":"function","function":{"name":"NAMEm6","arguments":"{}"}}]'


def shown_thoughts(target: Target) -> Iterator[str]:
    """Renderings in which some template keeps the thought: the last turn, or a turn that calls a tool."""
    answer = Message("assistant", CONTENT, THOUGHT)
    call = Message("assistant", CONTENT, THOUGHT, CALL)
    silent = Message("assistant", "", THOUGHT, CALL)
    result = Message("tool", RESULT, name=NAME, tool_call_id=f"functions.{NAME}:0")
    attempts: list[tuple[Sequence[Message], bool]] = [
        ([ASK, answer], False),
        ([ASK, call], False),
        ([ASK, call, result], True),
        ([ASK, silent, result], True),
    ]
    for messages, generation_prompt in attempts:
        rendered = render(target, messages, generation_prompt)
        if rendered is not None:
            yield rendered


def render(target: Target, messages: Sequence[Message], generation_prompt: bool = False) -> str | None:
    """What the template makes of messages; None when it refuses them."""
    try:
        return target.render_text(messages, generation_prompt=generation_prompt)
    except ValueError:
        return None
