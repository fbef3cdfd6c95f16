"""Faults of connections, on real sockets: a fault server in the same event loop, the real transport and pool."""

import asyncio
import contextlib
import errno
import random
import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from scripts.lib.client.attempts import Attempts
from scripts.lib.client.blame import Blame
from scripts.lib.client.pool import Pool
from scripts.lib.client.sending import Sender
from scripts.lib.client.transport import HttpTransport, authorization, require_descriptors
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Engine, Sampling
from scripts.lib.core.errors import UserError
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, Call, Failure, Reply, Request
from tests.fault_server.server import FaultServer, Settings

CONFIG = parse_config({"engine": {"kind": "sglang"}, "datasets": {"d": {"class": "B", "source": "x"}}}, "test")
ADAPTER = adapter_for(CONFIG)
REQUEST = Request("r1", [5, 6, 7], 200, 1, Sampling())


@contextlib.asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield site.name if not runner.addresses else f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fault_server(fault: str, hosted: bool = False) -> AsyncIterator[tuple[FaultServer, str, HttpTransport]]:
    server = FaultServer(Settings("t", faults={fault: 1.0}))
    async with serving(server.application()) as url, HttpTransport(hosted=hosted) as transport:
        yield server, url, transport


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def ask(transport: HttpTransport, url: str) -> Answer | Failure:
    reply = await transport.call(url, ADAPTER.request(REQUEST))
    return reply if isinstance(reply, Failure) else ADAPTER.read(REQUEST, reply, 0.0)


class Job:
    """One endpoint in a pool, and a sender, by a clock that the test sets."""

    def __init__(self, transport: HttpTransport, url: str) -> None:
        self.now = 0.0
        self.pool = Pool(8, lambda: self.now, 1000.0, idle_seconds=60.0)
        self.pool.update([(url, 0)])
        (self.endpoint,) = self.pool.servers.values()
        self.pool.admit(self.endpoint)
        self.now = 1.0
        settings = CONFIG.transport.model_copy(update={"base_seconds": 10.0, "min_tokens_per_second": 10.0})
        self.sender = Sender(settings, self.pool, transport)
        self.said: list[str] = []
        self.blame = Blame(settings, ADAPTER, self.pool, transport, self.said.append, random.Random(0))

    async def send(self) -> "asyncio.Task[Reply | Failure]":
        """The request on its way: it may take 30 s."""
        server = await self.pool.acquire(200.0)
        call = ADAPTER.request(REQUEST)
        sending = asyncio.create_task(self.sender.send(server, call, REQUEST.max_tokens, 200.0))
        await asyncio.sleep(0)
        return sending

    async def pass_deadline(self, sending: "asyncio.Task[Reply | Failure]") -> Failure:
        """The request's time is over now."""
        self.now = 31.0
        assert self.pool.check_progress() == []
        failure = await sending
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.billed) == ("retry", True)
        assert "no answer within 30 s" in failure.reason
        assert (self.endpoint.in_flight, self.endpoint.timeouts) == (0, {})
        return failure


# Our own servers are reached on kept connections, hosted APIs on new ones: the same faults mean the same.
both_ways = pytest.mark.parametrize("hosted", [False, True], ids=["own", "hosted"])


def test_stale_connection_costs_nothing() -> None:
    """A server that closes a kept connection just as it is reused: at once again, not an attempt."""

    async def test() -> None:
        async with fault_server("disconnect_idle") as (_, url, transport):
            first = await ask(transport, url)
            second = await ask(transport, url)  # on the connection of the first
            third = await ask(transport, url)  # on a fresh one
        assert isinstance(first, Answer)
        assert isinstance(second, Failure)
        assert (second.kind, second.billed) == ("free", False)
        assert isinstance(third, Answer)

    run(test)


@both_ways
def test_a_new_connection_that_breaks_after_the_send_may_have_been_billed(hosted: bool) -> None:
    """Only a kept one can be stale: 103 requests were billed, one was counted."""

    async def test() -> None:
        async def handle(request: web.Request) -> web.Response:
            await request.read()
            assert request.transport is not None
            request.transport.close()
            return web.Response()

        application = web.Application()
        application.router.add_post("/generate", handle)
        async with serving(application) as url, HttpTransport(hosted=hosted) as transport:
            failure = await ask(transport, url)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.billed) == ("retry", True)

    run(test)


@both_ways
@pytest.mark.parametrize("fault", ["reset_midbody", "short_content_length"])
def test_half_a_reply_is_no_answer(fault: str, hosted: bool) -> None:
    """Headers say 200, the body breaks off: no part of it is used, and it may have been paid for."""

    async def test() -> None:
        async with fault_server(fault, hosted) as (_, url, transport):
            failure = await ask(transport, url)
        assert isinstance(failure, Failure)
        assert failure.kind == "retry"
        assert failure.billed

    run(test)


@both_ways
def test_characters_split_over_chunks(hosted: bool) -> None:
    """Chunks that end inside a character make the same body."""

    async def test() -> None:
        async with fault_server("sse_split_utf8", hosted) as (_, url, transport):
            reply = await transport.call(url, ADAPTER.request(REQUEST))
        assert isinstance(reply, Reply)
        assert "naïve 漢字 🙂" in reply.json()["text"]

    run(test)


@both_ways
@pytest.mark.parametrize("fault", ["silent_stall", "timeout_ghost"])
def test_silence_ends_at_the_deadline(fault: str, hosted: bool) -> None:
    """No header ever."""

    async def test() -> None:
        async with fault_server(fault, hosted) as (server, url, transport):
            job = Job(transport, url)
            sending = await job.send()
            while not server.injected:
                await asyncio.sleep(0)
            await job.pass_deadline(sending)

    run(test)


def test_a_requests_time_follows_from_what_it_may_take() -> None:
    async def test() -> None:
        async with fault_server("silent_stall") as (_, url, transport):
            job = Job(transport, url)
            sending = await job.send()
            assert list(job.endpoint.timeouts.values()) == [job.now + 30.0]  # 10 s, and 200 tokens at 10 each second
            sending.cancel()

    run(test)


def test_stall_in_the_body_ends_at_the_deadline() -> None:
    """Headers and half a body, then silence."""

    async def test() -> None:
        half_sent, leave = asyncio.Event(), asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": "5000"})
            await response.prepare(request)
            await response.write(b"x" * 3000)
            half_sent.set()
            await leave.wait()
            return response

        application = web.Application()
        application.router.add_post("/generate", handle)
        async with serving(application) as url, HttpTransport() as transport:
            job = Job(transport, url)
            sending = await job.send()
            await half_sent.wait()
            await job.pass_deadline(sending)
            leave.set()

    run(test)


def test_ghosts_are_aborted() -> None:
    """What the client gave up is stopped on the server by its request id, or it would double the load."""

    async def test() -> None:
        server = FaultServer(Settings("t", tokens_per_second=0.001))
        async with serving(server.application()) as url, HttpTransport() as transport:
            job = Job(transport, url)
            sending = await job.send()
            while not server.running:
                await asyncio.sleep(0)
            failure = await job.pass_deadline(sending)
            assert server.running == 1  # the ghost
            attempts = Attempts()
            assert isinstance(await job.blame.next_try(job.endpoint, REQUEST.id, job.now, attempts, failure), float)
            assert attempts.avoid == url
            while server.running:
                await asyncio.sleep(0)

    run(test)


def test_hung_server_is_taken_out() -> None:
    """Health says 200 and connections are accepted, but nothing is ever answered (sglang issues 435 and 22779)."""

    async def test() -> None:
        server = FaultServer(Settings("t"))
        server.hung.set()
        async with serving(server.application()) as url, HttpTransport() as transport:
            health = await transport.call(url, Call("GET", "/health"))
            assert isinstance(health, Reply)
            assert health.status == 200
            job = Job(transport, url)
            job.sender.settings = CONFIG.transport  # deadlines of minutes
            sending = await job.send()
            job.now = 60.0
            assert job.pool.check_progress() == []
            job.now = 61.5
            assert job.pool.check_progress() == [job.endpoint]
            failure = await sending  # broken off, to go elsewhere
            assert isinstance(failure, Failure)
            attempts = Attempts()
            await job.blame.next_try(job.endpoint, REQUEST.id, job.now, attempts, failure)
            assert attempts.counted == 0  # not the prompt's fault
            assert job.pool.ready() == []
            assert job.pool.pick(100) is None

    run(test)


def test_deadline_that_passes_while_the_server_is_taken_out() -> None:
    """Both break the call off in one tick of the loop: one failure, no crash."""

    async def test() -> None:
        async with fault_server("silent_stall") as (server, url, transport):
            job = Job(transport, url)
            sending = await job.send()
            while not server.injected:
                await asyncio.sleep(0)
            [timeout] = job.endpoint.timeouts
            timeout.reschedule(asyncio.get_running_loop().time())
            job.pool.take_out(job.endpoint, "was restarted")
            assert isinstance(await sending, Failure)


def test_a_job_that_ends_while_a_deadline_passes_is_cancelled() -> None:
    """The deadline doesn't swallow what others want."""

    async def test() -> None:
        async with fault_server("silent_stall") as (server, url, transport):
            job = Job(transport, url)
            sending = await job.send()
            while not server.injected:
                await asyncio.sleep(0)
            job.pool.take_out(job.endpoint, "no answer for 600 s")
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert job.endpoint.in_flight == 0

    run(test)


def test_a_reply_that_comes_as_its_server_is_taken_out_is_broken_off() -> None:
    """Its canary has just failed: what it said before was voided, this would come after it."""

    async def test() -> None:
        arrived = asyncio.Event()

        class Wire:
            async def call(self, url: str, call: Call) -> Reply:
                await arrived.wait()
                return Reply(200, {}, b"{}")

        job = Job(Wire(), "http://s")  # type: ignore[arg-type]
        sending = await job.send()
        arrived.set()  # the reply is there, its worker has not been told yet
        job.pool.take_out(job.endpoint, "fails its canary")
        failure = await sending
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.billed) == ("retry", True)

    run(test)


def test_a_place_on_a_server_that_was_dismissed_meanwhile_is_given_back() -> None:
    """The place is given in the tick in which the lease says that the server was restarted."""

    async def test() -> None:
        async with fault_server("silent_stall") as (_, url, transport):
            job = Job(transport, url)
            place = await job.pool.acquire(200.0)
            job.pool.update([(url, 1)])
            failure = await job.sender.send(place, ADAPTER.request(REQUEST), REQUEST.max_tokens, 200.0)
            assert isinstance(failure, Failure)
            assert (failure.kind, failure.billed) == ("wait", False)
            assert job.pool.in_flight == 0

    run(test)


def test_a_slow_abort_does_not_turn_the_blame_on_the_prompt() -> None:
    """The server is back before it has heard of the abort."""

    async def test() -> None:
        async with fault_server("silent_stall") as (_, url, transport):
            job = Job(transport, url)
            job.pool.take_out(job.endpoint, "no answer for 600 s")

            async def abort(url: str, call: Call | None) -> None:
                job.pool.admit(job.endpoint)

            transport.abort = abort  # type: ignore[method-assign]
            broken_off = Failure("retry", "no answer within 9 s", billed=True)
            attempts = Attempts()
            await job.blame.next_try(job.endpoint, REQUEST.id, job.now, attempts, broken_off)
            assert attempts.counted == 0
            assert job.endpoint.status == "ready"

    run(test)


def test_no_hidden_limit_of_connections() -> None:
    """300 calls at once are 300 connections: aiohttp's default of 100 would stop here for ever."""

    async def test() -> None:
        everybody = asyncio.Barrier(300)

        async def handle(request: web.Request) -> web.Response:
            await everybody.wait()
            return web.json_response({})

        application = web.Application()
        application.router.add_post("/generate", handle)
        require_descriptors(600)
        async with serving(application) as url, HttpTransport() as transport:
            replies = await asyncio.gather(*(transport.call(url, ADAPTER.request(REQUEST)) for _ in range(300)))
        assert all(isinstance(reply, Reply) and reply.status == 200 for reply in replies)

    run(test)


def test_connections_are_reused() -> None:
    """One call after the other: one connection, so that local ports don't run out; and when they do, it waits."""

    async def test() -> None:
        peers = set()

        async def handle(request: web.Request) -> web.Response:
            assert request.transport is not None
            peers.add(request.transport.get_extra_info("peername"))
            return web.json_response({})

        application = web.Application()
        application.router.add_post("/generate", handle)
        async with serving(application) as url, HttpTransport() as transport:
            for _ in range(50):
                await transport.call(url, ADAPTER.request(REQUEST))
            assert len(peers) == 1
            async with HttpTransport(hosted=True) as hosted:
                for _ in range(5):
                    await hosted.call(url, ADAPTER.request(REQUEST))
            assert len(peers) == 6

    run(test)


def test_no_local_port_is_not_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        error = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        async def refuse(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
        for hosted in (False, True):
            async with HttpTransport(hosted=hosted) as transport:
                failure = await ask(transport, "http://127.0.0.1:1")
            assert isinstance(failure, Failure)
            assert failure.kind == "throttle"

    run(test)


@both_ways
def test_refused_connection_takes_the_endpoint_out(hosted: bool) -> None:
    async def test() -> None:
        async with HttpTransport(hosted=hosted) as transport:
            failure = await ask(transport, "http://127.0.0.1:1")
        assert isinstance(failure, Failure)
        assert failure.kind == "wait"
        assert not failure.billed

    run(test)


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert authorization(Engine()) == {}
    engine = Engine(api_key_env="A_KEY")
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(UserError, match="A_KEY is not set"):
        authorization(engine)
    monkeypatch.setenv("A_KEY", "k-1\n")
    assert authorization(engine) == {"Authorization": "Bearer k-1"}
    monkeypatch.setenv("A_KEY", "k-1\r\nHost: elsewhere")
    with pytest.raises(UserError, match="no header may have") as caught:
        authorization(engine)
    assert "k-1" not in str(caught.value)


def test_open_files_are_raised_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 connections need more than the usual 1,024 open files: found out before, not at the 769th."""
    limits = [(1024, 8192)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    require_descriptors(100)
    assert limits == [(1024, 8192)]
    require_descriptors(2000)
    assert limits[-1] == (4256, 8192)
    with pytest.raises(UserError, match=r"ulimit -Hn 10256"):
        require_descriptors(5000)


# --- limits that servers name ---


def test_a_pause_says_until_when() -> None:
    async def test() -> None:
        async with fault_server("silent_stall") as (_, url, transport):
            job = Job(transport, url)
            refused = Failure("throttle", "HTTP 429: slow down", retry_after=7.0)
            for _ in range(64):
                await job.blame.next_try(job.endpoint, REQUEST.id, job.now, Attempts(), refused)
            assert job.endpoint.paused_until == job.now + 7.0
            [line] = [line for line in job.said if "paused" in line]
            assert re.fullmatch(rf"{url} paused until (\S+ )?\d\d:\d\d:\d\d: HTTP 429: slow down", line)

    run(test)


def test_an_endpoint_whose_limit_resets_in_days_is_left_alone_and_the_job_ends_with_the_last_one() -> None:
    async def test() -> None:
        async with fault_server("silent_stall") as (_, url, transport):
            job = Job(transport, url)
            job.pool.update([(url, 0), ("http://other", 0)])
            other = job.pool.servers["http://other"]
            job.pool.admit(other)
            refused = Failure("throttle", "HTTP 429: monthly", retry_after=99999999.0)
            attempts = Attempts()
            delay = await job.blame.next_try(job.endpoint, REQUEST.id, job.now, attempts, refused)
            assert isinstance(delay, float)
            assert delay < 100  # the prompt goes to the other one
            assert (attempts.avoid, attempts.counted) == (url, 0)
            assert (job.endpoint.status, job.pool.ready()) == ("out", [other])
            assert sum("the others go on" in line for line in job.said) == 1
            await job.blame.next_try(job.endpoint, REQUEST.id, job.now, attempts, refused)
            assert sum("the others go on" in line for line in job.said) == 1
            with pytest.raises(UserError, match=r"http://other: HTTP 429: monthly: its limit resets in 27777:46:39"):
                await job.blame.next_try(other, REQUEST.id, job.now, attempts, refused)

    run(test)
