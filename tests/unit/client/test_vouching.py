"""What canaries vouch for: proven backwards, void backwards, refusals held until something was answered."""

import pytest

from scripts.lib.client.vouching import Voided, Vouching
from scripts.lib.core.errors import UserError

A, B = "http://a", "http://b"


class Kept:
    """What has arrived, as a job keeps it: (endpoint, work, refused) in order."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[str, str, bool]] = []
        self.proven: list[tuple[str, int]] = []
        self.under_way: set[str] = set()

    @property
    def position(self) -> int:
        return len(self.arrivals)

    def prove(self, url: str, before: int) -> None:
        self.proven.append((url, before))

    def void(self, url: str, since: int) -> Voided:
        names = {work for whose, work, _ in self.arrivals[since:] if whose == url}
        return Voided(names - self.under_way, names & self.under_way)

    def void_refusals(self, url: str, since: int) -> Voided:
        return Voided({work for whose, work, refused in self.arrivals[since:] if whose == url and refused}, set())


class Job:
    def __init__(self, answered: bool = True) -> None:
        self.kept, self.again, self.stand = Kept(), [], []
        self.vouching = Vouching(self.kept, self.again.append, answered=answered)

    def answer(self, url: str, work: str, *, odd: bool = False) -> None:
        self.vouching.arrived(url)
        self.kept.arrivals.append((url, work, False))
        self.vouching.answered(url, odd=odd)

    def refuse(self, url: str, work: str) -> None:
        def stands() -> None:
            self.kept.arrivals.append((url, work, True))
            self.stand.append(work)

        self.vouching.refused_work(url, self.vouching.arrived(url), work, "HTTP 400: no", stands)


def test_a_canary_that_fails_voids_what_its_endpoint_gave_since_the_last_good_one():
    job = Job()
    job.answer(A, "1")
    job.vouching.passed(A, job.vouching.moment(A))
    job.answer(A, "2")
    job.answer(B, "3")
    job.vouching.failed(A)
    assert job.kept.proven == [(A, 1)]
    assert job.again == [{"2"}]
    assert (job.vouching.doubtful(A), job.vouching.doubtful(B)) == (0, 1)
    job.vouching.failed(A)
    assert job.again == [{"2"}]


def test_what_comes_while_a_canary_is_out_is_not_proven_by_it():
    job = Job()
    job.answer(A, "1")
    sent = job.vouching.moment(A)
    job.answer(A, "2")
    job.vouching.passed(A, sent)
    assert job.vouching.doubtful(A) == 1
    job.vouching.failed(A)
    assert job.again == [{"2"}]


def test_two_canaries_at_once_prove_nothing_twice():
    """Of a server that was restarted while its canary was out, say."""
    job = Job()
    job.answer(A, "1")
    first, second = job.vouching.moment(A), job.vouching.moment(A)
    job.vouching.passed(A, first)
    job.answer(A, "2")
    job.vouching.passed(A, second)
    assert job.vouching.doubtful(A) == 1
    assert job.kept.proven == [(A, 1)]


def test_a_refused_canary_voids_refusals_only():
    job = Job()
    job.answer(A, "1")
    job.refuse(A, "2")
    job.vouching.refused(A)
    assert job.again == [{"2"}]
    assert job.vouching.doubtful(A) == 1
    job.vouching.failed(A)
    assert job.again == [{"2"}, {"1", "2"}]  # where it was kept, the job itself knows that it is void


def test_work_under_way_is_told_once():
    job = Job()
    job.answer(A, "1")
    job.kept.under_way = {"1"}
    job.vouching.failed(A)
    assert job.again == []
    assert job.vouching.forget_tainted("1")
    assert not job.vouching.forget_tainted("1")


def test_refusals_wait_for_the_first_answer_and_fall_with_their_endpoint():
    job = Job(answered=False)
    job.refuse(A, "1")
    job.refuse(B, "2")
    assert job.stand == []
    job.vouching.failed(A)
    assert job.again == [{"1"}]
    job.answer(B, "3")
    assert job.stand == ["2"]
    job.refuse(A, "4")
    assert job.stand == ["2", "4"]


def test_refusals_stand_when_nothing_else_is_left():
    job = Job(answered=False)
    job.refuse(A, "1")
    job.vouching.release()
    assert job.stand == ["1"]


def test_settings_that_everything_is_refused_for_stop_the_job():
    job = Job(answered=False)
    for number in range(19):
        job.refuse(A, str(number))
    with pytest.raises(UserError, match="the first 20 prompts were all refused, none was answered: HTTP 400: no"):
        job.refuse(A, "19")
    assert job.stand == []


def test_five_odd_ones_in_a_row_call_for_a_canary():
    job = Job()
    for number in range(4):
        job.answer(A, str(number), odd=True)
    job.answer(A, "good")
    for number in range(4):
        job.refuse(A, str(number))
    assert not job.vouching.odd(A)
    job.answer(A, "odd", odd=True)
    assert job.vouching.odd(A)
    assert not job.vouching.odd(B)
    job.vouching.moment(A)
    assert not job.vouching.odd(A)


def test_one_broken_number_calls_for_a_canary_whatever_follows():
    job = Job()
    job.vouching.suspect(A)
    job.answer(A, "good")
    assert job.vouching.odd(A)
    assert not job.vouching.odd(B)
    job.vouching.moment(A)
    assert not job.vouching.odd(A)


def test_what_an_earlier_job_left_falls_with_the_next_canary_there():
    job = Job()
    job.kept.arrivals = [(A, "1", False), (A, "2", False), (A, "3", False)]
    job.vouching.doubt(A, 2, 1)
    assert job.vouching.doubtful(A) == 2
    job.vouching.failed(A)
    assert job.again == [{"2", "3"}]
