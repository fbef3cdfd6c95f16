"""Budgets: tokens and money, per dataset and over all, shared by the jobs of all shards.

Each shard has an account beside its journal, `state/journals/{dataset}/{shard}.budget`, which only its
own job writes: what it has spent, and what it holds for requests in flight. A job takes holds in
small grants, under one lock, after adding up all accounts; so nothing is sent that was not reserved,
and many jobs never spend more than there is.

What a budget counts: tokens count when an answer arrives (prompt and output). Money counts when it may
have been billed: a request that was sent and never answered counts with its whole reservation, also
when the job was killed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from scripts.lib.config.model import Config
from scripts.lib.core import durable, locks
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import State

# Requests that one grant is for: fewer looks at the ledger, yet little that others wait for.
_GRANT = 8


@dataclass(slots=True)
class Amount:
    """Tokens and US dollars."""

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.tokens + other.tokens, self.cost + other.cost)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.tokens - other.tokens, self.cost - other.cost)

    def times(self, factor: int) -> "Amount":
        return Amount(self.tokens * factor, self.cost * factor)


@dataclass(slots=True, frozen=True)
class Limit:
    """At most this much; None: no limit."""

    tokens: int | None
    cost: float | None

    def room(self, used: Amount, need: Amount) -> bool:
        tokens_fit = self.tokens is None or used.tokens + need.tokens <= self.tokens
        # Sums of many small prices: a millionth of a dollar is rounding.
        return tokens_fit and (self.cost is None or used.cost + need.cost <= self.cost + 1e-6)

    def text(self) -> str:
        parts = [f"{self.tokens:,} tokens"] if self.tokens is not None else []
        parts += [f"${self.cost:.2f}"] if self.cost is not None else []
        return " and ".join(parts)


class Account:
    """The account of one shard's job, and its view of all others."""

    def __init__(self, state: Path, config: Config, dataset: str, shard: str, spent: Amount) -> None:
        """`spent` is what the shard's answers add up to; the account knows also what was discarded.

        The journal's lock must be held: whatever the account holds is then a dead predecessor's.
        Raises UserError when money is limited and nothing tells what a request may cost.
        """
        one = config.datasets[dataset]
        self.overall = Limit(config.budget.tokens, config.budget.cost)
        self.own = Limit(one.token_budget, one.cost_budget)
        self.limited = any(x is not None for limit in (self.overall, self.own) for x in (limit.tokens, limit.cost))
        self.price_prompt = config.engine.price_prompt / 1e6
        self.price_output = config.engine.price_output / 1e6
        self.dataset, self.datasets = dataset, config.by_class("B")
        self.state = State(state)
        self.path = self.state.account(dataset, shard)
        self.spent, self.held, self.in_flight = spent, Amount(), Amount()
        self.exhausted: Amount | None = None  # a need that nothing will ever fit again
        self.dearest = 0.0  # US dollars per reserved token, of an answer that cost more than was reserved
        self._saved: dict = {}
        money = self.overall.cost is not None or self.own.cost is not None
        if money and not self.price_output:
            raise UserError(
                "a cost budget needs engine.price_prompt and engine.price_output (US dollars per million tokens) to "
                "reserve before sending: set them to the API's highest price"
            )
        if self.limited:
            before = _read(self.path)
            # What the predecessor held when it died may have been billed; its tokens never arrived.
            self.spent = Amount(
                max(spent.tokens, before.get("tokens", 0)),
                max(spent.cost, before.get("cost", 0.0) + before.get("held_cost", 0.0)),
            )
            self._save()

    def price(self, prompt_tokens: int, output_tokens: int) -> float:
        """US dollars by the configured prices."""
        return prompt_tokens * self.price_prompt + output_tokens * self.price_output

    def reserve(self, prompt_tokens: int, max_tokens: int) -> Amount | Literal["wait", "never"]:
        """Reserve what a request may use at most. `wait`: others may give back; `never`: it won't fit any more."""
        tokens = prompt_tokens + max_tokens
        need = Amount(tokens, max(self.price(prompt_tokens, max_tokens), self.dearest * tokens))
        if not self.limited:
            return need
        if self.exhausted is not None and _covers(need, self.exhausted):
            return "never"
        if not _covers(self.held - self.in_flight, need):
            verdict = self._take_grant(need)
            if verdict is not None:
                return verdict
        self.in_flight = self.in_flight + need
        return need

    def _take_grant(self, need: Amount) -> Literal["wait", "never"] | None:
        with locks.hold(self.state.accounts_lock):
            self.held = self.in_flight
            others, held = self._others()
            for wanted in (need.times(_GRANT), need):
                if all(limit.room(used + self.spent + self.held, wanted) for limit, used in others):
                    self.held = self.held + wanted
                    self._save()
                    return None
            self._save()
            if held or self.in_flight.tokens:
                return "wait"
            self.exhausted = need
            return "never"

    def _others(self) -> tuple[list[tuple[Limit, Amount]], bool]:
        """[(limit, what others have used and hold)] of dataset and whole run, and whether somebody holds something."""
        sums = {True: Amount(), False: Amount()}
        anybody = False
        for dataset in self.datasets:
            for path in self.state.accounts(dataset):
                if path == self.path:
                    continue
                account = _read(path)
                used = Amount(account.get("tokens", 0), account.get("cost", 0.0))
                held = Amount(account.get("held_tokens", 0), account.get("held_cost", 0.0))
                if held.tokens and _dead(path):
                    held = Amount(0, held.cost)
                elif held.tokens:
                    anybody = True
                sums[dataset == self.dataset] += used + held
        return [(self.own, sums[True]), (self.overall, sums[True] + sums[False])], anybody

    def settle(self, reserved: Amount, used: Amount) -> None:
        """A request is over and used this much (nothing, when it was refused).

        One that used more than was reserved shows that the prices are too low, or not those that are billed: more is
        reserved from then on, and what was granted at the old price is asked for again.
        """
        self.spent = self.spent + used
        if not self.limited:
            return
        self.in_flight = self.in_flight - reserved
        self.held = self.held - reserved
        if used.cost > reserved.cost and reserved.tokens:
            self.dearest = max(self.dearest, used.cost / reserved.tokens)
        if not _covers(reserved, used):
            self.held = self.in_flight

    def save(self, *, give_back: bool = False) -> None:
        """Write the account when it changed: every second, and at the end with `give_back`.

        Requests that are in flight at the end stay reserved: they may be billed.
        """
        if not self.limited:
            return
        with locks.hold(self.state.accounts_lock):
            if give_back or not self.in_flight.tokens:
                self.held = self.in_flight
            self._save()

    def reason(self) -> str:
        """Why a prompt was not sent."""
        limits = [("dataset", self.own), ("whole run", self.overall)]
        texts = [f"{name} {limit.text()}" for name, limit in limits if limit.text()]
        return f"the budget is used up ({', '.join(texts)}): raise it and run again"

    def _save(self) -> None:
        account = {
            "tokens": self.spent.tokens,
            "cost": round(self.spent.cost, 9),
            "held_tokens": max(0, self.held.tokens),
            "held_cost": max(0.0, round(self.held.cost, 9)),
        }
        if account != self._saved:
            durable.write_json(self.path, account)
            self._saved = account


def _covers(room: Amount, need: Amount) -> bool:
    return room.tokens >= need.tokens and room.cost >= need.cost - 1e-12


def _read(path: Path) -> dict:
    try:
        account = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    account = account if isinstance(account, dict) else {}
    return {name: value for name, value in account.items() if isinstance(value, int | float)}


def _dead(account: Path) -> bool:
    """Whether the job of an account is gone: its journal's lock is free."""
    try:
        return not locks.is_held(account.with_suffix(".journal.lock"))
    except FileNotFoundError:
        return True
