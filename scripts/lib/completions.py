"""Stage 2: the target answers the prompts of one shard.

Reads a prompt shard, asks the leased endpoints with many requests in flight, journals every answer as
it arrives, and writes the finished shard: one terminal outcome per prompt. Run again after any end,
it asks only for what is missing.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib import durable
from scripts.lib.answered import Answered, prompt_ids, read_prompts, token_counts
from scripts.lib.backlog import Backlog, Work
from scripts.lib.canary import Canary
from scripts.lib.config import Config, stage_settings
from scripts.lib.dialogue import Dialogue, Step
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, EngineFacts, Failure, Request
from scripts.lib.errors import UserError
from scripts.lib.fleet.lease import Lease, lease
from scripts.lib.pool import Pool, Server
from scripts.lib.progress import Figures, Meter, ProgressFile, Status, line
from scripts.lib.provenance import code_version
from scripts.lib.records import read_provenance
from scripts.lib.target import Target, load_target
from scripts.lib.transport import Transport, require_descriptors

_LINE_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # at the lease: share, endpoints, load
_RAMP_SECONDS = 0.05
_SYNC_SECONDS = 1.0
_PROMPT_COST = 0.05  # a prompt token's work next to an output token's


class Stopped(Exception):
    """A signal asked the job to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Shard:
    """What one job is asked to do."""

    config: Config
    dataset: str
    shard: str
    target: Path
    prompts: Path
    output: Path
    state: Path

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.shard}"


def identity(config: Config, dataset: str, target: Target) -> dict[str, Any]:
    """The settings that answers depend on. Answers of another identity are refused.

    Budgets say how many answers there are, not what they are; `drop` is `keep` plus a later stage.
    """
    settings = stage_settings(config, "completions", dataset)
    settings.pop("budget")
    one = dict(settings["dataset"])
    for name in ("token_budget", "cost_budget"):
        one.pop(name)
    if one["truncation"] == "drop":
        one["truncation"] = "keep"
    return {
        **settings,
        "dataset": one,
        "target": {"tokenizer": target.tokenizer_hash, "template": target.template_hash},
    }


def say(text: str) -> None:
    """One line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def generate(shard: Shard) -> None:
    """Answer a shard. Raises UserError; SystemExit with 128 + signal when told to stop."""
    config = shard.config
    if shard.dataset not in config.datasets:
        raise UserError(f"no dataset `{shard.dataset}` in the configuration; there are {', '.join(config.datasets)}")
    if config.datasets[shard.dataset].data_class != "B":
        raise UserError(f"dataset {shard.dataset} is of class A: its conversations are kept, not answered")
    target = load_target(shard.target)
    answered = Answered(shard.state, shard.dataset, shard.shard, identity(config, shard.dataset, target))
    try:
        asyncio.run(Generation(shard, target, answered).run())
    except Stopped as stop:
        raise SystemExit(128 + stop.number) from None
    finally:
        answered.close()


class Generation:
    """One run over a shard."""

    def __init__(self, shard: Shard, target: Target, answered: Answered) -> None:
        config = shard.config
        self.shard, self.config, self.target, self.answered = shard, config, target, answered
        self.settings = config.transport
        dataset = config.datasets[shard.dataset]
        self.lane = config.lanes[dataset.lane]
        self.lane_name = dataset.lane
        self.adapter = adapter_for(config)
        self.clock = time.monotonic
        self.jitter = random.Random()
        self.dialogue = Dialogue(
            target, shard.dataset, dataset, config.sampling, self.lane.max_tokens, self.settings, self.jitter
        )
        self.pool = Pool(self.lane.concurrency, self.clock, self.settings.ramp_per_second, self.settings.idle_seconds)
        self.meter = Meter(shard.name, 0, self.clock)
        self.files = ProgressFile(shard.state, config, shard.dataset, shard.shard)
        self.facts: EngineFacts | None = None
        self.mean_output = float(self.lane.max_tokens) / 4  # smoothed; a guess before the first answer
        self.status: Status = "waiting"
        self.warned: dict[str, float] = {}

    # --- the whole ---

    async def run(self) -> None:
        """From the prompts to the finished shard."""
        left = self._count()
        self.answered.journal.later = asyncio.get_running_loop().call_soon
        try:
            if left:
                require_descriptors(self.lane.concurrency)
                with lease(self.config, self.shard.target, self.shard.state, self.lane_name) as held:
                    await self._ask_all(held)
            outcomes = self.answered.finish(
                self.shard.prompts, self.shard.output, self._over_budget, self._provenance()
            )
        except BaseException as error:
            await self._report("stopped" if isinstance(error, Stopped) else "failed")
            raise
        self.meter.outcomes = outcomes
        await self._report("done")
        counts = ", ".join(f"{count} {name}" for name, count in outcomes.most_common() if count)
        say(f"{self.shard.name} done: {outcomes.total()} prompts ({counts})")

    def _count(self) -> int:
        """Count what there is and what is left; say both."""
        total = left = 0
        for id in prompt_ids(self.shard.prompts):
            total += 1
            left += id not in self.answered
        totals = self.answered.totals
        self.meter.total = total
        self.meter.resume(totals.outcomes, totals.input_tokens, totals.output_tokens, totals.cost_usd)
        say(f"{self.shard.name} {total} prompts, {total - left} answered before, {left} left")
        if self.answered.journal.damaged:
            say(f"{self.shard.name} warning: {self.answered.journal.damaged} damaged journal lines; asked again")
        return left

    async def _ask_all(self, held: Lease) -> None:
        """Ask until every prompt has its outcome, or something stops the job."""
        async with self._session() as self.transport:
            self.canary = Canary(self.config, self.target, self.adapter, self.transport)
            self.backlog = Backlog(self._work(), self.clock)
            stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with _signals(stop):
                helpers = [
                    asyncio.create_task(self._keep_endpoints(held)),
                    asyncio.create_task(self._keep_ramp()),
                    asyncio.create_task(self._keep_synced()),
                    asyncio.create_task(self._keep_reporting()),
                ]
                workers = [asyncio.create_task(self._worker()) for _ in range(self.lane.concurrency)]
                try:
                    await _first_trouble([stop, *helpers], workers)
                finally:
                    for task in (*helpers, *workers):
                        task.cancel()
                    await asyncio.gather(*helpers, *workers, return_exceptions=True)
                    self.answered.journal.write()

    def _session(self) -> Transport:
        headers = {}
        if self.config.engine.api_key_env:
            key = os.environ.get(self.config.engine.api_key_env)
            if not key:
                raise UserError(f"environment variable {self.config.engine.api_key_env} holds no API key: set it")
            headers["Authorization"] = f"Bearer {key}"
        return Transport(headers, through_proxy=self.config.engine.kind == "openai")

    def _work(self) -> Iterator[Work]:
        for prompt in read_prompts(self.shard.prompts, lambda id: id not in self.answered):
            partial = self.answered.partial.pop(prompt.id, None)
            yield Work(prompt, partial.turns, partial.part) if partial else Work(prompt)

    # --- one prompt ---

    async def _worker(self) -> None:
        while (work := await self.backlog.get()) is not None:
            step = await self._advance(work)
            if step.kind == "again":
                self.backlog.again(work, step.delay)
            else:
                assert step.completion is not None
                counts = token_counts(step.completion.turns)
                self.answered.done(step.completion, *counts)
                self.meter.add(step.completion.outcome, *counts)
                self.backlog.finished()

    async def _advance(self, work: Work) -> Step:
        """Ask turn after turn until the prompt is done or has to wait."""
        while True:
            request = self.dialogue.next_request(work)
            if isinstance(request, Step):
                return request
            step = await self._ask(work, request)
            if step.kind == "turn":
                assert step.turn is not None
                self.answered.turn(work.prompt.id, step.turn)
            elif step.kind == "part":
                assert step.turn is not None
                self.answered.part(work.prompt.id, step.turn)
            else:
                return step

    async def _ask(self, work: Work, request: Request) -> Step:
        """Send one request and see what its answer or failure means."""
        expected = min(float(request.max_tokens), self.mean_output) + _PROMPT_COST * len(request.prompt_ids)
        server = await self.pool.acquire(expected, work.avoid)
        self.meter.in_flight += 1
        begun = self.clock()
        seconds = self.settings.base_seconds + request.max_tokens / self.settings.min_tokens_per_second
        deadline = asyncio.timeout(seconds)
        server.deadlines.add(deadline)
        try:
            work.sends += 1
            reply = await self.transport.call(server.url, self.adapter.request(request), deadline)
        finally:
            server.deadlines.discard(deadline)
            self.meter.in_flight -= 1
            self.pool.release(server, expected)
        took = self.clock() - begun
        result = reply if isinstance(reply, Failure) else self.adapter.read(request, reply, time.time())
        if isinstance(result, Answer):
            step = self.dialogue.answered(work, request, result, server.url, took)
            if isinstance(step, Step):
                tokens = len(result.output_ids or ()) or result.output_tokens or 0
                self.pool.succeeded(server, tokens, took)
                self.mean_output += 0.02 * (tokens - self.mean_output)
                work.avoid = None
                return step
            result = step
        return await self._failed(work, request, server, result)

    async def _failed(self, work: Work, request: Request, server: Server, failure: Failure) -> Step:
        """Blame the prompt, the server, or nobody."""
        if failure.kind == "fatal":
            raise UserError(f"{server.url}: {failure.reason}")
        if failure.kind == "permanent":
            return self.dialogue.failed(work, failure, self.pool.successes)
        self.meter.retried[failure.kind] += 1
        work.avoid = server.url
        taken_out = server.status != "ready"
        if failure.billed:
            await self.transport.abort(server.url, self.adapter.abort(request.id))
        if taken_out and failure.kind == "retry":
            # Broken off because the endpoint was taken out: not the prompt's fault.
            failure = Failure("wait", f"{server.url} {server.reason}")
        elif failure.kind == "throttle":
            self.pool.throttled(server)
        elif failure.kind == "wait":
            self.pool.failed(server, failure.reason, suspect=True)
        elif failure.kind == "retry":
            # The same prompt failing again while nothing else is answered: let a canary decide whose fault it is.
            self.pool.failed(server, failure.reason, suspect=work.successes_seen == self.pool.successes)
        self._warn(server, failure)
        return self.dialogue.failed(work, failure, self.pool.successes)

    def _warn(self, server: Server, failure: Failure) -> None:
        """Say what fails, each kind at most every ten seconds; the progress line has the number."""
        now = self.clock()
        if failure.kind != "free" and now - self.warned.get(failure.kind, float("-inf")) >= 10:
            self.warned[failure.kind] = now
            say(f"{self.shard.name} {failure.kind}: {server.url}: {failure.reason}")

    # --- helpers beside the workers ---

    async def _keep_endpoints(self, held: Lease) -> None:
        """Follow the lease, and test endpoints before they are used."""
        begun = down_since = self.clock()
        tests: set[asyncio.Task] = set()
        while True:
            endpoints = await asyncio.to_thread(held.endpoints, _LOOK_SECONDS)
            for server in self.pool.update((endpoint.url, endpoint.incarnation) for endpoint in endpoints):
                say(f"{self.shard.name} {server.url} is gone; its requests go elsewhere")
            self.pool.ceiling = held.share(self.lane.concurrency)
            for url, metrics in held.metrics().items():
                self.pool.observe(url, metrics)
            for server in self.pool.check_progress():
                say(f"{self.shard.name} {server.url} hangs ({server.reason}): taken out until a canary passes")
            for server in self.pool.due_for_test():
                server.testing = True
                tests.add(asyncio.create_task(self._test(server)))
            for test in [test for test in tests if test.done()]:
                tests.discard(test)
                test.result()
            now = self.clock()
            if self.pool.ready() or not endpoints:
                down_since = now
            elif now - down_since > self.settings.outage_seconds:
                reasons = "; ".join(f"{s.url}: {s.reason}" for s in self.pool.servers.values())
                raise UserError(
                    f"no endpoint has answered for {now - down_since:.0f} s ({reasons}): run again when they do, "
                    "nothing is lost"
                )
            if self.status == "waiting" and self.pool.ready():
                self.status = "running"
                say(f"{self.shard.name} {len(self.pool.ready())} endpoints ready after {now - begun:.1f} s")
            self.pool.wake()
            await asyncio.sleep(_LOOK_SECONDS if self.status == "running" and not tests else _RAMP_SECONDS)

    async def _test(self, server: Server) -> None:
        """Probe and canary of an endpoint; admit it or try later."""
        try:
            facts = await self.canary.probe(server.url)
            if isinstance(facts, Failure):
                self.pool.postpone(server, facts.reason)
                return
            self.facts = facts
            if facts.context_length is not None:
                self.dialogue.context_length = min(self.dialogue.context_length, facts.context_length)
            problem = await self.canary.ask(server.url)
            if problem is None:
                self.pool.admit(server)
                return
            if isinstance(problem, Failure):
                if problem.kind == "fatal":
                    raise UserError(f"{server.url}: {problem.reason}")
                self.pool.postpone(server, problem.reason)
                return
            self.pool.postpone(server, f"degenerate: {problem}")
            say(f"{self.shard.name} {server.url} fails its canary: {problem}")
        finally:
            server.testing = False

    async def _keep_ramp(self) -> None:
        """Let the number in flight grow in small steps."""
        while True:
            await asyncio.sleep(_RAMP_SECONDS)
            if self.pool.ramping:
                self.pool.wake()

    async def _keep_synced(self) -> None:
        """fsync the journal in groups."""
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            await asyncio.to_thread(self.answered.journal.sync)
            if self.answered.journal.problem:
                raise self.answered.journal.problem

    async def _keep_reporting(self) -> None:
        while True:
            await self._report(self.status)
            await asyncio.sleep(_LINE_SECONDS)

    async def _report(self, status: Status) -> None:
        figures: Figures = self.meter.figures(status)
        if status == "running":
            say(line(self.shard.name, figures))
        try:
            await asyncio.to_thread(self.files.write, figures)
        except OSError as error:
            say(f"{self.shard.name} warning: no progress file: {error.strerror}")

    # --- the end ---

    def _over_budget(self, id: str) -> str | None:
        return None

    def _provenance(self) -> dict[str, Any]:
        """What the finished shard says about itself."""
        facts = self.facts
        return {
            "stage": "completions",
            "dataset": self.shard.dataset,
            "shard": self.shard.shard,
            "settings": stage_settings(self.config, "completions", self.shard.dataset),
            "target": self.target.provenance(),
            "engine": {"kind": self.config.engine.kind, "version": facts.version if facts else None},
            "prompts": {
                "sha256": durable.sha256_file(self.shard.prompts),
                "provenance": read_provenance(self.shard.prompts),
            },
            "code": code_version(),
        }


async def _first_trouble(watched: list[asyncio.Future], workers: list[asyncio.Task]) -> None:
    """Wait until all workers are done; raise what any of them or of the watched raises before."""
    everyone = asyncio.gather(*workers)
    try:
        await asyncio.wait([everyone, *watched], return_when=asyncio.FIRST_COMPLETED)
        for future in watched:
            if future.done():
                future.result()
        await everyone
    finally:
        everyone.cancel()
        with contextlib.suppress(BaseException):
            await everyone


@contextlib.contextmanager
def _signals(stop: asyncio.Future[None]) -> Iterator[None]:
    """SIGTERM and SIGINT end the job in order: what has arrived is journalled."""
    loop = asyncio.get_running_loop()

    def ask(number: int) -> None:
        if not stop.done():
            stop.set_exception(Stopped(number))

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if not stop.done():
            stop.cancel()
