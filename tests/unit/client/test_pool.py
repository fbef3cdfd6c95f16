"""The pool by a virtual clock: balance, limits, ramp, taking out and letting in again."""

import asyncio
import itertools

import pytest

from scripts.lib.client.pool import Pool
from scripts.lib.engines.metrics import EngineMetrics


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def made(clock, servers=1, ceiling=100, ramp=1e9) -> Pool:
    """A pool whose servers are ready and whose ramp is over."""
    pool = Pool(ceiling, clock, ramp, idle_seconds=600)
    pool.update([(f"u{number}", 0) for number in range(servers)])
    for server in pool.servers.values():
        pool.admit(server)
    clock.now += 1
    return pool


def fill(pool: Pool, number: int, expected: float = 10.0) -> list:
    """Take places without waiting; as many as there are, at most `number`."""
    taken = []
    for _ in range(number):
        server = pool.pick(expected)
        if server is None:
            break
        pool._take(server, expected)
        taken.append(server)
    return taken


def test_no_request_before_an_endpoint_passed_its_canary(clock):
    pool = Pool(10, clock, 1e9, 600)
    pool.update([("u0", 0)])
    assert pool.pick(1) is None
    server = pool.servers["u0"]
    pool.admit(server)
    clock.now += 1
    assert pool.pick(1) is server


def test_requests_start_in_a_ramp_not_in_a_burst(clock):
    """2,000 connections at once met 980 rate-limit errors."""
    pool = Pool(2000, clock, 50, 600)
    pool.update([("u0", 0)])
    pool.admit(pool.servers["u0"])
    sent = []
    for _ in range(60):
        fill(pool, 5000)
        sent.append(pool.in_flight)
        clock.now += 1
    assert sent[0] == 1
    assert all(later - earlier <= 50 for earlier, later in itertools.pairwise(sent))
    assert sent[40] == 2000


def test_the_ceiling_follows_the_lease(clock):
    pool = made(clock, ceiling=10)
    assert len(fill(pool, 50)) == 10
    pool.ceiling = 4
    for _ in range(7):
        pool.release(pool.servers["u0"], 10)
    assert len(fill(pool, 50)) == 1


def test_equal_servers_get_equal_work(clock):
    pool = made(clock, 4, ceiling=40)
    fill(pool, 40)
    assert [server.in_flight for server in pool.servers.values()] == [10] * 4


def test_long_requests_count_more_than_short_ones(clock):
    pool = made(clock, 2)
    long = pool.pick(1000)
    pool._take(long, 1000)
    assert {server.url for server in fill(pool, 9, 100)} == {({"u0", "u1"} - {long.url}).pop()}


def test_a_slow_server_gets_less(clock):
    pool = made(clock, 2, ceiling=90)
    for _ in range(50):
        pool.succeeded(pool.servers["u0"], 100, 1.0)
        pool.succeeded(pool.servers["u1"], 100, 2.0)
    fill(pool, 90)
    fast, slow = (server.in_flight for server in pool.servers.values())
    assert fast == pytest.approx(60, abs=2)
    assert slow == pytest.approx(30, abs=2)


def test_a_burst_of_errors_is_one_signal_and_recovery_is_additive(clock):
    pool = made(clock, ceiling=100)
    server = pool.servers["u0"]
    fill(pool, 100)
    for _ in range(50):
        pool.throttled(server, clock.now)
    limit = server.limit
    assert limit == pytest.approx(70, abs=2)
    for _ in range(int(limit)):
        pool.succeeded(server, 10, 1.0)
    assert server.limit == pytest.approx(limit + 1, abs=0.2)
    clock.now += 10
    pool.throttled(server, clock.now)
    assert server.limit == pytest.approx(0.7 * (limit + 1), abs=2)


def test_a_server_that_refuses_everything_is_left_alone_for_longer_and_longer(clock):
    pool = made(clock)
    server = pool.servers["u0"]
    pauses = []
    for _ in range(10):
        pauses.append(pool.throttled(server, clock.now))
        clock.now = max(clock.now, server.paused_until) + 0.001
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pool.pick(1) is server
    pool.succeeded(server, 10, 1.0)
    pool.throttled(server, clock.now)
    assert server.paused_until <= clock.now


@pytest.mark.parametrize("says", [None, 1.0, 30.0, 400.0])
def test_a_burst_of_refusals_is_one_pause_as_long_as_the_server_says(clock, says):
    """64 refusals within 0.3 s stopped a run for a minute."""
    pool = made(clock)
    server, begun = pool.servers["u0"], clock.now
    pauses = []
    for _ in range(64):
        clock.now += 0.3 / 64
        pauses.append(pool.throttled(server, begun, says))
    assert [pause for pause in pauses if pause] == [says or 1.0]
    assert server.paused_until - begun == pytest.approx(0.3 * 3 / 64 + 1.0 if says is None else 0.3 + says)
    clock.now = server.paused_until + 5  # a slow refusal of the same burst
    assert pool.throttled(server, begun) == 0.0
    assert server.paused_until < clock.now
    assert pool.throttled(server, clock.now, says) == (says or 2.0)  # the next one


def test_a_pause_of_no_time_is_none(clock):
    pool = made(clock)
    server = pool.servers["u0"]
    assert [pool.throttled(server, clock.now, 0.0) for _ in range(10)] == [0.0] * 10
    assert pool.pick(1) is server


def test_a_long_queue_in_the_engine_lowers_the_limit_and_a_short_one_does_not(clock):
    pool = made(clock, ceiling=100)
    server = pool.servers["u0"]
    fill(pool, 100)
    pool.observe("u0", EngineMetrics(running=72, queued=10))
    assert server.limit == float("inf")
    clock.now += 5
    pool.observe("u0", EngineMetrics(running=72, queued=28))
    assert server.limit == 90  # what keeps the engine busy with a short queue: 72 and a quarter
    clock.now += 5
    pool.observe("u0", EngineMetrics(running=72, queued=28))
    assert server.limit == 90  # the same queue, still being worked off
    clock.now += 5
    pool.observe("u0", EngineMetrics(running=60, queued=15, kv_usage=0.99))
    assert server.limit == 80  # no room in the cache: only what runs


def test_a_hung_server_is_taken_out_and_comes_back_after_a_canary(clock):
    pool = made(clock, 2)
    fill(pool, 4)
    pool.servers["u0"].timeouts[FakeTimeout()] = float("inf")
    pool.servers["u1"].timeouts[FakeTimeout()] = float("inf")
    clock.now += 500
    pool.succeeded(pool.servers["u1"], 10, 1.0)
    clock.now += 200
    hung = pool.check_progress()
    assert [server.url for server in hung] == ["u0"]
    assert pool.servers["u0"].status == "out"
    assert {server.url for server in fill(pool, 5)} == {"u1"}
    server = pool.servers["u0"]
    pool.admit(server)
    assert server.status == "ready"


class FakeTimeout:
    """The part of a timeout that the pool uses."""

    def __init__(self):
        self.over = False

    def reschedule(self, when):
        self.over = True

    def expired(self):
        return self.over


def test_a_request_is_broken_off_when_its_time_is_up_and_the_others_go_on(clock):
    pool = made(clock)
    early, late = FakeTimeout(), FakeTimeout()
    pool.servers["u0"].timeouts.update({early: clock.now + 10, late: clock.now + 20})
    clock.now += 9
    assert pool.check_progress() == []
    assert not early.over
    clock.now += 1
    assert pool.check_progress() == []
    assert (early.over, late.over) == (True, False)


def test_progress_that_the_engine_tells_is_no_hang(clock):
    pool = made(clock)
    fill(pool, 4)
    pool.servers["u0"].timeouts[FakeTimeout()] = float("inf")
    for step in range(5):
        clock.now += 400
        pool.observe("u0", EngineMetrics(running=4), mark=(step,))
        assert pool.check_progress() == []
    clock.now += 400
    pool.observe("u0", EngineMetrics(running=4), mark=(4,))
    clock.now += 400
    assert len(pool.check_progress()) == 1


def test_a_restarted_or_vanished_server_breaks_off_its_requests(clock):
    pool = made(clock, 2)
    timeouts = {}
    for url in ("u0", "u1"):
        timeouts[url] = FakeTimeout()
        pool.servers[url].timeouts[timeouts[url]] = float("inf")
    old = pool.servers["u0"]
    pool.update([("u0", 1)])
    assert all(timeout.over for timeout in timeouts.values())
    assert set(pool.servers) == {"u0"}
    assert pool.servers["u0"] is not old
    assert pool.servers["u0"].status == "new"


def test_several_failures_in_a_row_take_a_server_out(clock):
    pool = made(clock)
    server = pool.servers["u0"]
    pool.failed(server, "HTTP 500")
    pool.succeeded(server, 1, 1.0)
    for _ in range(2):
        pool.failed(server, "HTTP 500")
        assert server.status == "ready"
    pool.failed(server, "HTTP 500")
    assert server.status == "out"
    assert server.reason == "HTTP 500"


def test_another_server_is_preferred_after_a_failure(clock):
    pool = made(clock, 2)
    assert pool.pick(1, avoid="u0").url == "u1"
    fill(pool, 50)
    pool.take_out(pool.servers["u1"], "x")
    assert pool.pick(1, avoid="u0").url == "u0"


def test_waiters_are_served_in_order_and_cancelled_ones_skipped(clock):
    async def scenario():
        pool = made(clock, ceiling=1)
        first = await pool.acquire(1)
        waiting = [asyncio.create_task(pool.acquire(1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        pool.release(first, 1)
        await asyncio.sleep(0)
        assert waiting[1].done()
        assert not waiting[2].done()
        assert pool.in_flight == 1
        pool.release(await waiting[1], 1)
        pool.release(await waiting[2], 1)
        assert pool.in_flight == 0

    asyncio.run(scenario())


def test_a_place_given_to_somebody_who_is_cancelled_is_given_back(clock):
    async def scenario():
        pool = made(clock, ceiling=1)
        first = await pool.acquire(1)
        waiting = asyncio.create_task(pool.acquire(1))
        await asyncio.sleep(0)
        pool.release(first, 1)  # gives the place to `waiting`, which doesn't run again
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.in_flight == 0

    asyncio.run(scenario())


def test_slow_servers_are_spared_the_last_prompts(clock):
    """A long answer begun on a slow server just before the end would keep all others waiting."""
    pool = made(clock, servers=2)
    left = 1_000
    pool.left = lambda: left
    fast, slow = pool.servers.values()
    for _ in range(100):
        clock.now += 1.0
        pool.succeeded(fast, 100, 10.0)
        pool.succeeded(slow, 100, 40.0)
    fast.outstanding = 1e6
    assert pool.pick(100) is slow  # an answer each half second: enough to do until it is ready
    left = 60  # half a minute; twice the expected length takes 80 s on the slow server, 20 s on the fast one
    assert pool.pick(100) is fast
    fast.limit = fast.in_flight = 1
    assert pool.pick(100) is None  # waits for a place on the fast one
    pool.take_out(fast, "is gone")
    assert pool.pick(100) is slow  # better than nobody
