"""What the lines of a journal say: a type for each kind of record.

On disk a record is the list `[kind, *fields]`, and the answer itself, if it has one, is the line's body.
"""

from typing import Any, NamedTuple

from scripts.lib.core.records import Turn


class Ended(NamedTuple):
    """How a prompt ended, in numbers."""

    outcome: str
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    billed_tokens: int = 0  # as the endpoint counted them

    @classmethod
    def of(cls, outcome: str, turns: list[Turn]) -> "Ended":
        inputs = outputs = tokens = 0
        cost = 0.0
        for turn in turns:
            inputs += len(turn.prompt_ids)
            outputs += len(turn.output_ids)
            cost += turn.cost_usd
            tokens += billed(turn)
        return cls(outcome, inputs, outputs, cost, tokens)


class FirstTurn(NamedTuple):
    """What tells the answers to prompts apart, by their first turn. Digests of 128 bits."""

    prompt_id: str
    sent: bytes
    answer: bytes  # of its seed and ids: copies of an answer have the same


def billed(turn: Turn) -> int:
    """The tokens that an answer used up of a budget."""
    return turn.billed_tokens or len(turn.prompt_ids) + len(turn.output_ids)


class Header(NamedTuple):
    """The first line. Its body is the identity that the answers were made with."""

    made_from: str = ""  # digest of what the first prompts were made from; journals of before don't tell


class Done(NamedTuple):
    """A prompt has its outcome. Body: its Completion, without texts and messages."""

    prompt_id: str
    outcome: str
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    endpoint: str = ""  # gave the answer or refusal that led to the outcome, if one did
    billed_tokens: int | None = None
    taken_from: str = ""

    @property
    def ended(self) -> Ended:
        return Ended(self.outcome, self.input_tokens, self.output_tokens, self.cost_usd, _billed(self))


class TurnDone(NamedTuple):
    """An answered turn of a conversation that goes on. Body: the Turn."""

    prompt_id: str
    endpoint: str = ""


class TurnPart(NamedTuple):
    """A truncated answer that is to be continued, or asked again with more room. Body: the Turn."""

    prompt_id: str
    endpoint: str = ""


class Void(NamedTuple):
    """What was answered to a prompt is not to be trusted. The rest is its outcome's, where it had one."""

    prompt_id: str
    outcome: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    billed_tokens: int | None = None
    taken_from: str = ""

    @property
    def ended(self) -> Ended | None:
        if self.outcome is None:
            return None
        return Ended(self.outcome, self.input_tokens, self.output_tokens, self.cost_usd, _billed(self))


class Proven(NamedTuple):
    """A canary vouches for what an endpoint answered before a position of the journal."""

    endpoint: str
    position: int


def _billed(record: Done | Void) -> int:
    """Journals of before don't tell."""
    return record.input_tokens + record.output_tokens if record.billed_tokens is None else record.billed_tokens


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
