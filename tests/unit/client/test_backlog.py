"""The backlog: everything handed out once, retries when they are due, an end when all is done."""

import asyncio

from scripts.lib.client.backlog import Backlog, Work
from scripts.lib.core.records import Prompt


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def work(*names: str):
    return iter([Work(Prompt(name, "d", "s", name)) for name in names])


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_everything_once_then_none_for_all_workers():
    async def scenario():
        backlog = Backlog(work(*"abcde"), Clock(), 10)
        seen = []

        async def worker():
            while (one := await backlog.get()) is not None:
                seen.append(one.prompt.id)
                await asyncio.sleep(0)
                backlog.finished()

        await asyncio.gather(*(worker() for _ in range(8)))
        assert sorted(seen) == list("abcde")
        assert not backlog.open

    run(scenario())


def test_a_retry_comes_when_it_is_due_and_before_new_prompts():
    async def scenario():
        clock = Clock()
        backlog = Backlog(work("a", "b", "c"), clock, 10)
        first = await backlog.get()
        backlog.again(first, 5.0)
        assert (await backlog.get()).prompt.id == "b"
        clock.now = 5.0
        assert (await backlog.get()) is first
        assert (await backlog.get()).prompt.id == "c"

    run(scenario())


def test_an_idle_worker_wakes_for_a_retry():
    """Real time, but no waiting: the delay is over at once by the injected clock."""

    async def scenario():
        clock = Clock()
        backlog = Backlog(work("a"), clock, 10)
        one = await backlog.get()
        idle = asyncio.create_task(backlog.get())
        await asyncio.sleep(0)
        assert not idle.done()
        backlog.again(one, 0.0)
        assert (await idle) is one
        backlog.finished()
        assert await backlog.get() is None

    run(scenario())


def test_no_new_prompts_while_too_many_wait():
    async def scenario():
        clock = Clock()
        backlog = Backlog(work(*"abcdef"), clock, 2)
        for _ in range(2):
            backlog.again(await backlog.get(), 60.0)
        idle = asyncio.create_task(backlog.get())
        await asyncio.sleep(0)
        assert not idle.done()
        assert backlog.waiting == 2
        clock.now = 60.0
        assert (await backlog.get()).prompt.id == "a"
        idle.cancel()

    run(scenario())


def test_added_work_reopens_it():
    async def scenario():
        backlog = Backlog(work("a"), Clock(), 10)
        await backlog.get()
        backlog.finished()
        assert await backlog.get() is None
        assert not backlog.open
        backlog.add(work("b"))
        assert backlog.open
        assert (await backlog.get()).prompt.id == "b"

    run(scenario())
