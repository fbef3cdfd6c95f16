"""Budgets: nothing is sent that was not reserved, jobs together never spend more, and a crash is charged."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.completions.budget import Account, Amount
from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.core.locks import hold


def config(tokens=None, cost=None, whole_tokens=None, whole_cost=None, prices=(1.0, 2.0)):
    return parse_config(
        {
            "engine": {"price_prompt": prices[0], "price_output": prices[1]},
            "lanes": {"short": {"max_tokens": 100, "concurrency": 4}},
            "shards": 4,
            "budget": {"tokens": whole_tokens, "cost": whole_cost},
            "datasets": {
                name: {"class": "B", "source": "x", "token_budget": tokens, "cost_budget": cost} for name in "ab"
            },
        },
        "test",
    )


class Jobs:
    """Jobs of several shards in one state folder; each holds its journal's lock while it lives."""

    def __init__(self, state: Path, settings):
        self.state, self.settings = state, settings
        self.locks: dict = {}

    def start(self, dataset="a", shard="000", spent=None) -> Account:
        lock = self.state / "journals" / dataset / f"{shard}.journal.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        self.locks[dataset, shard] = hold(lock, wait=0.0)
        return Account(self.state, self.settings, dataset, shard, spent or Amount())

    def kill(self, dataset="a", shard="000") -> None:
        self.locks.pop((dataset, shard)).close()


def test_without_limits_everything_goes_and_no_file_is_written(tmp_path):
    budget = Jobs(tmp_path, config()).start()
    assert budget.reserve(1000, 10**9) == Amount(10**9 + 1000, 1000e-6 + 2000.0)
    assert not list(tmp_path.rglob("*.budget"))


def test_what_is_in_flight_counts_and_what_was_not_used_comes_back(tmp_path):
    budget = Jobs(tmp_path, config(tokens=250)).start()
    first, second = budget.reserve(20, 100), budget.reserve(20, 100)
    assert budget.reserve(20, 100) == "wait"
    budget.settle(first, Amount(30))
    assert budget.reserve(20, 100) == "wait"  # 30 spent, 120 in flight
    budget.settle(second, Amount(120))
    assert budget.reserve(20, 100) == "never"
    third = budget.reserve(20, 80)
    assert isinstance(third, Amount)
    budget.settle(third, Amount(100))
    assert budget.spent.tokens == 250
    assert "dataset 250 tokens" in budget.reason()


def test_jobs_of_one_dataset_share_and_other_datasets_do_not(tmp_path):
    jobs = Jobs(tmp_path, config(tokens=250))
    first, second, other = jobs.start(), jobs.start(shard="001"), jobs.start("b")
    assert isinstance(first.reserve(20, 100), Amount)
    assert isinstance(second.reserve(20, 100), Amount)
    assert first.reserve(20, 100) == "wait"
    assert isinstance(other.reserve(20, 100), Amount)
    assert isinstance(other.reserve(20, 100), Amount)


def test_the_whole_run_has_a_limit_too(tmp_path):
    jobs = Jobs(tmp_path, config(whole_tokens=130))
    first, other = jobs.start(), jobs.start("b")
    assert isinstance(first.reserve(20, 100), Amount)
    assert other.reserve(20, 100) == "wait"
    assert isinstance(other.reserve(2, 8), Amount)


def test_a_dead_jobs_tokens_come_back_but_its_money_may_be_spent(tmp_path):
    jobs = Jobs(tmp_path, config(tokens=250, cost=0.0005))
    dying, other = jobs.start(), jobs.start(shard="001")
    assert isinstance(dying.reserve(20, 100), Amount)  # 220 micro-dollars
    assert isinstance(other.reserve(20, 100), Amount)
    assert other.reserve(20, 100) == "wait"
    jobs.kill()
    assert other.reserve(20, 100) == "wait"  # there are tokens again, but not the money
    other.settle(Amount(120, 0.00022), Amount(50, 0.0001))
    assert isinstance(other.reserve(20, 50), Amount)
    assert jobs.start().spent == Amount(0, 0.00022)


def test_after_a_crash_the_account_knows_more_than_the_answers(tmp_path):
    jobs = Jobs(tmp_path, config(tokens=1000))
    budget = jobs.start()
    reserved = budget.reserve(20, 100)
    budget.settle(reserved, Amount(90))
    budget.save(give_back=True)
    jobs.kill()
    assert jobs.start(spent=Amount(60)).spent.tokens == 90
    jobs.kill()
    assert jobs.start(spent=Amount(200)).spent.tokens == 200


def test_an_account_that_holds_no_numbers_counts_as_far_as_it_does(tmp_path):
    jobs = Jobs(tmp_path, config(tokens=1000))
    jobs.start().save()
    jobs.kill()
    for path in tmp_path.rglob("*.budget"):
        path.write_text('{"tokens": 90, "cost": null, "held_tokens": "x", "held_cost": []}')
    assert jobs.start(spent=Amount(60)).spent == Amount(90, 0.0)


def test_a_raised_limit_opens_what_was_closed(tmp_path):
    jobs = Jobs(tmp_path, config(tokens=100))
    assert jobs.start().reserve(20, 100) == "never"
    jobs.kill()
    jobs.settings = config(tokens=200)
    assert isinstance(jobs.start().reserve(20, 100), Amount)


def test_money_needs_prices(tmp_path):
    with pytest.raises(UserError, match=r"price_prompt and engine.price_output"):
        Jobs(tmp_path, config(cost=1.0, prices=(0.0, 0.0))).start()


def test_prices_that_are_too_low_are_learned_from_the_first_answer(tmp_path):
    """A key of one's own: the provider bills what the API's prices don't say; what was granted before counts anew."""
    budget = Jobs(tmp_path, config(cost=1.0)).start()
    for _ in range(2):
        reserved = budget.reserve(30, 100)
        assert reserved.cost in (pytest.approx(230e-6), pytest.approx(0.5))
        budget.settle(reserved, Amount(44, 0.5))
    assert budget.reserve(30, 100) == "never"
    assert budget.spent.cost == 1.0


def test_answers_in_flight_together_teach_one_price(tmp_path):
    budget = Jobs(tmp_path, config(cost=10.0)).start()
    for reserved in [budget.reserve(30, 100) for _ in range(4)]:
        budget.settle(reserved, Amount(44, 0.5))
    assert budget.reserve(30, 100).cost == pytest.approx(0.5)


def test_excess_of_a_grant_goes_back_to_the_others(tmp_path):
    """The first grant is for eight requests; a job that ends gives back what it didn't use."""
    jobs = Jobs(tmp_path, config(tokens=1000))
    first, second = jobs.start(), jobs.start(shard="001")
    reserved = first.reserve(20, 100)
    assert first.held.tokens == 8 * 120
    assert second.reserve(20, 100) == "wait"
    first.settle(reserved, Amount(120))
    first.save(give_back=True)
    assert isinstance(second.reserve(20, 100), Amount)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), limit=st.integers(50, 2000))
def test_never_more_than_the_limit_whatever_the_jobs_do(tmp_path_factory, data, limit):
    """Three jobs reserve, settle, save and die in any order; spent plus in flight stays below the limit."""
    jobs = Jobs(tmp_path_factory.mktemp("budget"), config(tokens=limit, whole_tokens=limit))
    names = [("a", "000"), ("a", "001"), ("b", "000")]
    alive = {name: jobs.start(*name) for name in names}
    flying: dict = {name: [] for name in names}
    arrived = dict.fromkeys(names, 0)
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.sampled_from(names))
        budget = alive[name]
        action = data.draw(st.sampled_from(["reserve", "reserve", "settle", "save", "die"]))
        if action == "reserve":
            reserved = budget.reserve(data.draw(st.integers(1, 50)), data.draw(st.integers(1, 200)))
            if isinstance(reserved, Amount):
                flying[name].append(reserved)
        elif action == "settle" and flying[name]:
            reserved = flying[name].pop()
            used = data.draw(st.integers(0, reserved.tokens))
            budget.settle(reserved, Amount(used))
            arrived[name] += used
        elif action == "save":
            budget.save()
        elif action == "die":
            jobs.kill(*name)
            flying[name] = []
            alive[name] = jobs.start(*name, spent=Amount(arrived[name]))
        total = sum(arrived.values()) + sum(one.tokens for many in flying.values() for one in many)
        assert total <= limit
    for name in names:
        jobs.kill(*name)
