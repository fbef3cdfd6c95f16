"""What canaries vouch for: answers and refusals count as proven once their endpoint passes a canary after them.

Until then they are doubtful, by endpoint. A canary that fails voids all that is doubtful there, one that is refused
itself voids only what the endpoint has refused; what is void is asked again, and work under way that holds some of it
starts anew. Refusals stand only once something was answered: settings that no prompt is accepted with are refused for
every one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from scripts.lib.core.errors import UserError

# Odd answers in a row (one token repeated, nothing, a refusal) that call for a canary at once.
_ODD_IN_A_ROW = 5
_MOST_HELD = 20  # refusals before the first answer that tell of wrong settings


class Voided(NamedTuple):
    """Ids of the work that is not to be trusted."""

    ended: set[str]  # had its outcome
    under_way: set[str]  # had a part of it


class Arrivals(Protocol):
    """Where a job keeps what has arrived. Each arrival has a position, in their order."""

    @property
    def position(self) -> int:
        """Where the next one will stand."""

    def prove(self, url: str, before: int) -> None:
        """Note for later jobs that what `url` gave before a position is proven."""

    def void(self, url: str, since: int) -> Voided:
        """Discard what `url` gave from a position on."""

    def void_refusals(self, url: str, since: int) -> Voided:
        """Discard what `url` refused from a position on."""


class Moment(NamedTuple):
    """Where the arrivals stood when a canary was sent."""

    number: int
    position: int


@dataclass(slots=True)
class _Doubtful:
    """What an endpoint has given since its last good canary."""

    since: int  # position of the first
    refusals: dict[int, bool] = field(default_factory=dict)  # by the arrival's number, whether it was one
    odd: int = 0  # odd ones in a row
    suspect: bool = False  # one of them alone calls for a canary


class _Held(NamedTuple):
    """A refusal that waits for the first answer."""

    url: str
    work: str
    stands: Callable[[], None]


class Vouching:
    """What one job has from each endpoint, and how far it is to be trusted."""

    def __init__(self, arrivals: Arrivals, ask_again: Callable[[set[str]], None], *, answered: bool) -> None:
        """`ask_again` takes ids of work; `answered`: an earlier job has had answers already."""
        self._arrivals, self._ask_again, self._answered = arrivals, ask_again, answered
        self._number = 0  # of the next arrival
        self._endpoints: dict[str, _Doubtful] = {}
        self._tainted: set[str] = set()  # work under way that holds something void
        self._held: list[_Held] = []

    # --- what arrives ---

    def doubt(self, url: str, count: int, since: int) -> None:
        """Take over what an earlier job has left unproven: so many arrivals, from a position on."""
        self._endpoints[url] = _Doubtful(since, dict.fromkeys((self._next() for _ in range(count)), False))

    def arrived(self, url: str) -> int:
        """Something has come from an endpoint; `answered` or `refused_work` says what. Returns its number."""
        doubtful = self._endpoints.get(url)
        if doubtful is None:
            doubtful = self._endpoints[url] = _Doubtful(self._arrivals.position)
        number = self._next()
        doubtful.refusals[number] = False
        return number

    def answered(self, url: str, *, odd: bool = False) -> None:
        """It was an answer. With the first one the refusals before it stand."""
        doubtful = self._endpoints.get(url)
        if doubtful is not None:
            doubtful.odd = doubtful.odd + 1 if odd else 0
        if not self._answered:
            self.release()

    def suspect(self, url: str) -> None:
        """An answer showed that the endpoint's numbers are broken: a canary is due at once."""
        self._endpoints.setdefault(url, _Doubtful(self._arrivals.position)).suspect = True

    def refused_work(self, url: str, number: int, work: str, reason: str, stands: Callable[[], None]) -> None:
        """It was a refusal of `work`. Calls `stands` now or, when nothing was answered so far, after the first answer.

        Raises UserError when there have been too many before any answer.
        """
        doubtful = self._endpoints.get(url)
        if doubtful is not None:
            doubtful.odd += 1
            if number in doubtful.refusals:
                doubtful.refusals[number] = True
        if self._answered:
            stands()
            return
        self._held.append(_Held(url, work, stands))
        if len(self._held) >= _MOST_HELD:
            raise UserError(
                f"{url}: the first {_MOST_HELD} prompts were all refused, none was answered: {reason}: correct what it "
                "names and run again, they are asked anew"
            )

    def release(self) -> None:
        """There are answers, or nothing else is left to ask: the refusals stand."""
        held, self._held, self._answered = self._held, [], True
        for one in held:
            one.stands()

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def forget_tainted(self, work: str) -> bool:
        """Whether work under way holds something void, which its worker is told once."""
        if work not in self._tainted:
            return False
        self._tainted.discard(work)
        return True

    # --- canaries ---

    def doubtful(self, url: str) -> int:
        """Arrivals from an endpoint that no canary has vouched for."""
        return len(self._endpoints[url].refusals) if url in self._endpoints else 0

    def odd(self, url: str) -> bool:
        """Whether an endpoint's last answers call for a canary at once."""
        doubtful = self._endpoints.get(url)
        return doubtful is not None and (doubtful.suspect or doubtful.odd >= _ODD_IN_A_ROW)

    def moment(self, url: str) -> Moment:
        """A canary is sent now: what arrives from here on, the next one has to prove."""
        if url in self._endpoints:
            self._endpoints[url].odd, self._endpoints[url].suspect = 0, False
        return Moment(self._number, self._arrivals.position)

    def passed(self, url: str, sent: Moment) -> None:
        """A canary passed: what came before it was sent is proven, for later jobs as well."""
        doubtful = self._endpoints.get(url)
        if doubtful is None:
            return
        left = {number: refusal for number, refusal in doubtful.refusals.items() if number >= sent.number}
        proven = len(doubtful.refusals) - len(left)
        doubtful.refusals, doubtful.since = left, max(doubtful.since, sent.position)
        if proven:
            self._arrivals.prove(url, doubtful.since)

    def failed(self, url: str) -> None:
        """A canary failed: all that is doubtful there is asked again."""
        if self.doubtful(url):
            self._again(url, self._arrivals.void(url, self._endpoints.pop(url).since))

    def refused(self, url: str) -> None:
        """A canary was refused: answers that came before are as good as ever, other refusals are asked again."""
        if self.doubtful(url):
            doubtful = self._endpoints[url]
            doubtful.refusals = {number: refusal for number, refusal in doubtful.refusals.items() if not refusal}
            self._again(url, self._arrivals.void_refusals(url, doubtful.since))

    def _again(self, url: str, voided: Voided) -> None:
        self._tainted |= voided.under_way
        again = voided.ended | {one.work for one in self._held if one.url == url}
        self._held = [one for one in self._held if one.url != url]
        if again:
            self._ask_again(again)
