"""What the lines of a journal say: a type for each kind of record.

On disk a record is the list `[kind, *fields]`, and the answer itself, if it has one, is the line's body.
"""

from typing import Any, NamedTuple


class Header(NamedTuple):
    """The first line. Its body is the identity that the answers were made with."""

    name: str = ""


class Done(NamedTuple):
    """A prompt has its outcome. Body: its Completion, without texts and messages."""

    prompt_id: str
    outcome: str
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    endpoint: str = ""  # gave the answer or refusal that led to the outcome, if one did


class TurnDone(NamedTuple):
    """An answered turn of a conversation that goes on. Body: the Turn."""

    prompt_id: str
    endpoint: str = ""


class TurnPart(NamedTuple):
    """A truncated answer that is to be continued, or asked again with more room. Body: the Turn."""

    prompt_id: str
    endpoint: str = ""


class Void(NamedTuple):
    """What was answered to a prompt is not to be trusted. The sums are those of its outcome, where it had one."""

    prompt_id: str
    outcome: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


class Proven(NamedTuple):
    """A canary vouches for what an endpoint answered before a position of the journal."""

    endpoint: str
    position: int


Record = Header | Done | TurnDone | TurnPart | Void | Proven
_KINDS: dict[str, Any] = {
    "header": Header,
    "done": Done,
    "turn": TurnDone,
    "part": TurnPart,
    "void": Void,
    "proven": Proven,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_list(record: Record) -> list:
    """A record as it is written."""
    return [_NAMES[type(record)], *record]


def from_list(written: list) -> Record:
    """A record as it was written. Raises KeyError or TypeError for one of another program."""
    return _KINDS[written[0]](*written[1:])
