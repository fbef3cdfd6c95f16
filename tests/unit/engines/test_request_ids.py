"""Ids of requests over restarts of a job, and beside each other."""

from scripts.lib.engines.request_ids import OURS, RequestIds


def test_a_job_that_starts_again_asks_under_other_ids():
    first, second = RequestIds(), RequestIds()
    assert not {first.make("a" * 32, 0) for _ in range(1000)} & {second.make("a" * 32, 0) for _ in range(1000)}


def test_no_id_is_the_beginning_of_another():
    """SGLang aborts by prefix: `x-0-1` would end `x-0-12` as well."""
    made = RequestIds()
    names = [made.make("b" * 32, part) for part in (0, 1, 12, 123, 9_999, 12_345) for _ in range(30)]
    assert len(set(names)) == len(names)
    assert len({len(name) for name in names}) == 1
    assert all(OURS.fullmatch(name) for name in names)
