"""Whether an answer without ids can be that to its request: no reply may reach a request that it doesn't belong to.

Engines that return ids tell whose answer it is. A text API tells less, but something: its replies have ids of their own,
none of which comes twice, and it counts the prompt's tokens, by its own template, so always the same number more or
less than ours. Either may be wrong for good (constant ids, counts that vary), which shows: then it is not gone by.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.lib.engines.base import Answer, Failure, Request

CANARY = "canary"  # stands for the prompt that it asks
_REMEMBERED = 20_000  # replies of an endpoint; a second copy comes soon after the first
_FEW = 10  # answers, from which on the share of odd ones says something
_MOST_ODD = 0.4  # of the answers: an API that is odd more often counts in a way of its own
_SAME_COUNT = 3  # times in a row that a prompt is counted otherwise: then it is the prompt
_EXCEPTIONS = 5  # such prompts: then the difference is not constant


@dataclass(slots=True)
class _Replies:
    """The replies of one endpoint: by id, whose they were and a digest of what they said."""

    seen: OrderedDict[str, tuple[str, int]] = field(default_factory=OrderedDict)
    unique: bool = True


@dataclass(slots=True)
class _Doubt:
    """A prompt whose answers were counted otherwise."""

    expected: int
    counted: int
    times: int = 1  # in a row


@dataclass(slots=True)
class _Counts:
    """How many tokens more than we an API counts for a prompt, of one form of conversation."""

    usual: int | None = None
    told: set[int] = field(default_factory=set)  # its counts so far, and our own of the same prompts
    asked: set[int] = field(default_factory=set)
    answers: int = 0
    odd: int = 0  # of these, and no two of them are each other's
    exceptions: int = 0
    doubts: dict[str, _Doubt] = field(default_factory=dict)  # by prompt

    @property
    def constant(self) -> bool:
        often_odd = self.answers >= _FEW and self.odd > _MOST_ODD * self.answers
        return not often_odd and self.exceptions < _EXCEPTIONS

    def doubt(self, prompt: str, expected: int, counted: int) -> bool:
        """Whether an answer is to be asked for again."""
        pair = next((p for p, d in self.doubts.items() if (d.counted, d.expected) == (expected, counted)), None)
        if pair is not None:  # each has the other's answer: that says nothing of how the API counts
            self.odd -= 2
            del self.doubts[pair]
            self.doubts.pop(prompt, None)
            return True
        before = self.doubts.get(prompt)
        if before is None or before.counted != counted:
            self.doubts[prompt] = _Doubt(expected, counted)
            return True
        before.times += 1
        if before.times < _SAME_COUNT:
            return True
        del self.doubts[prompt]
        self.exceptions += 1
        return False


class Belonging:
    """The answers of text APIs in one job."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._replies: dict[str, _Replies] = {}
        self._counts: dict[tuple, _Counts] = {}

    def problem(self, url: str, prompt: str, request: Request, answer: Answer) -> Failure | None:
        """Why an answer is not taken for that to `request`, which asks `prompt` (an id): it is to be asked again."""
        return self._came_before(url, prompt, answer) or self._counted_otherwise(url, prompt, request, answer)

    def expect(self, url: str, request: Request, answer: Answer) -> None:
        """Learn from the first canary's answer, which comes while nothing else is asked, how the endpoint counts."""
        counts = self._counts_of(url, request, answer)
        if answer.prompt_tokens is not None and counts.usual is None:
            counts.usual = answer.prompt_tokens - len(request.prompt_ids)
            counts.told.add(answer.prompt_tokens)
            counts.asked.add(len(request.prompt_ids))
        if answer.reply_id:
            replies = self._replies.setdefault(url, _Replies())
            replies.seen.setdefault(answer.reply_id, (CANARY, hash((answer.text, answer.reasoning))))

    def _came_before(self, url: str, prompt: str, answer: Answer) -> Failure | None:
        replies = self._replies.setdefault(url, _Replies())
        if not answer.reply_id or not replies.unique:
            return None
        said = prompt, hash((answer.text, answer.reasoning))
        before = replies.seen.setdefault(answer.reply_id, said)
        if len(replies.seen) > _REMEMBERED:
            replies.seen.popitem(last=False)
        if before[1] != said[1]:
            replies.unique = False
            replies.seen.clear()
        elif before[0] != prompt and len(replies.seen) > 1:  # else its ids may be one and the same for good
            return Failure("retry", f"the answer to another request came again ({answer.reply_id[:60]})", billed=True)
        return None

    def _counted_otherwise(self, url: str, prompt: str, request: Request, answer: Answer) -> Failure | None:
        counts, counted = self._counts_of(url, request, answer), answer.prompt_tokens
        if counted is None or not counts.constant:
            return None
        counts.told.add(counted)
        counts.asked.add(len(request.prompt_ids))
        if len(counts.told) == 1 < len(counts.asked):
            return None  # the same for prompts of any length so far: it counts nothing
        if counts.usual is None:
            counts.usual = counted - len(request.prompt_ids)
        expected = len(request.prompt_ids) + counts.usual
        counts.answers += 1
        if counted == expected:
            counts.doubts.pop(prompt, None)
            return None
        counts.odd += 1
        again = counts.doubt(prompt, expected, counted)
        if not counts.constant:
            self._say(f"warning: {url} counts prompts in a way of its own, which doesn't tell whose answer one is")
            return None
        text = f"an answer to {counted} prompt tokens came, {expected} were to be counted: another request's?"
        return Failure("retry", text, billed=True) if again else None

    def _counts_of(self, url: str, request: Request, answer: Answer) -> _Counts:
        form = url, answer.model, answer.provider, len(request.messages), bool(request.tools)
        return self._counts.setdefault(form, _Counts())
