"""Stage 2: the target answers the prompts of one shard.

Reads a prompt shard, asks the leased endpoints with many requests in flight, journals every answer as
it arrives, and writes the finished shard: one terminal outcome per prompt. Run again after any end,
it asks only for what is missing.
"""

import asyncio
import functools
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

from scripts.lib.client.attempts import GivenUp
from scripts.lib.client.backlog import Backlog, Work
from scripts.lib.client.belonging import Belonging
from scripts.lib.client.blame import Blame
from scripts.lib.client.canary import Canary
from scripts.lib.client.pool import Pool, PooledEndpoint
from scripts.lib.client.sending import Sender
from scripts.lib.client.stopping import Stopped, first_trouble, signals
from scripts.lib.client.supervision import Supervisor
from scripts.lib.client.transport import HttpTransport, authorization, require_descriptors
from scripts.lib.client.vouching import Vouching
from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.completions.arrivals import ShardArrivals
from scripts.lib.completions.budget import Account
from scripts.lib.completions.dialogue import Dialogue, Step
from scripts.lib.completions.elsewhere import search
from scripts.lib.completions.finishing import finish
from scripts.lib.completions.identity import identity
from scripts.lib.completions.job import ShardJob
from scripts.lib.completions.payment import Payment
from scripts.lib.completions.progress import Meter, ProgressFile
from scripts.lib.completions.reporting import Reporter, say
from scripts.lib.completions.shard_provenance import shard_provenance
from scripts.lib.core.errors import DISK_FULL, UserError
from scripts.lib.core.provenance import differences
from scripts.lib.core.records import OUTCOMES, read_provenance
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, Failure, Request
from scripts.lib.fleet.lease import Lease, lease
from scripts.lib.prompts.shard import made_from, read_prompts
from scripts.lib.target.model import Target, load_target
from scripts.lib.target.output import add_text

_SAVE_SECONDS = 1.0
_KEPT_BACK = 2  # tokens of the context that SGLang never fills: no news
_BUDGET_SECONDS = 0.5
_DRAIN_SECONDS = 30.0  # for what is in flight when the disk is full
_GARBAGE = 100_000  # new objects between two looks for cycles
_PROMPT_COST = 0.05  # a prompt token's work next to an output token's


def generate(job: ShardJob) -> None:
    """Answer the shard of a job. Raises UserError; SystemExit with 128 + signal when told to stop."""
    config = job.config
    if job.dataset not in config.datasets:
        raise UserError(f"no dataset `{job.dataset}` in the configuration; there are {', '.join(config.datasets)}")
    if config.datasets[job.dataset].data_class != "B":
        raise UserError(f"dataset {job.dataset} is of class A: its conversations are kept, not answered")
    target = load_target(job.target)
    made_for = read_provenance(job.prompts).get("target", target.provenance())
    if made_for != target.provenance():
        changed = "; ".join(differences(made_for, target.provenance()))
        raise UserError(f"{job.prompts} was made for another target ({changed}): delete it and run again")
    # The imported libraries are a million objects that live for ever: don't let the collector look through them.
    gc.freeze()
    # An answer is a few hundred objects that die by themselves: looking for cycles at each seven hundredth costs as much
    # as reading it.
    gc.set_threshold(_GARBAGE, 50, 100)
    answered = ShardAnswers(
        job.state,
        job.dataset,
        job.shard,
        identity(config, job.dataset, target),
        functools.partial(add_text, target),
        made_from(job.prompts),
    )
    try:
        search(job, target, answered, lambda text: say(f"{job.name} {text}"))
        asyncio.run(Generation(job, target, answered).run())
    except Stopped as stop:
        raise SystemExit(128 + stop.number) from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(f"{job.state}: {error.strerror}: free some space and run again, nothing is lost") from None
    finally:
        answered.close()


class Generation:
    """One run over a shard."""

    def __init__(
        self, job: ShardJob, target: Target, answers: ShardAnswers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        config = job.config
        self.job, self.config, self.target, self.answers = job, config, target, answers
        self.settings = config.transport
        dataset = config.datasets[job.dataset]
        self.lane, self.lane_name = config.lanes[dataset.lane], dataset.lane
        self.adapter = adapter_for(config)
        if dataset.truncation == "continue" and not self.adapter.exact:
            raise UserError(
                f"datasets.{job.dataset}.truncation: a hosted API can't continue from ids: set `retry`, `keep` or `drop`"
            )
        self.clock = clock
        self.dialogue = Dialogue(target, job.dataset, config, self.lane.max_tokens)
        self.pool = Pool(self.lane.concurrency, self.clock, self.settings.ramp_per_second, self.settings.idle_seconds)
        self.pool.left = self._left
        self.meter = Meter(job.name, 0, self.clock)
        files = ProgressFile(job.state, config, job.dataset, job.shard)
        self.reporter = Reporter(self.meter, files, lambda: self.pool.in_flight)
        totals = answers.totals
        self.account = Account(job.state, config, job.dataset, job.shard, answers.paid)
        self.mean_output = self.lane.max_tokens / 4  # smoothed; a guess before the first answer
        self.supervisor: Supervisor | None = None
        self.broken: Counter[str] = Counter()  # answers of broken engines, by endpoint and reason
        self.vouching = Vouching(
            ShardArrivals(answers, self.meter, job.prompts),
            lambda prompts: self.backlog.add(self._work(prompts.__contains__)),
            answered=any(totals.outcomes[name] for name, outcome in OUTCOMES.items() if outcome.generated),
        )
        self.belonging = None if self.adapter.exact else Belonging(self.say)
        for url, (count, since) in answers.unproven().items():
            self.vouching.doubt(url, count, since)

    def say(self, text: str) -> None:
        self.reporter.say(text)

    # --- the whole ---

    async def run(self) -> None:
        """From the prompts to the finished shard."""
        left = self._count()
        try:
            if left:
                require_descriptors(self.lane.concurrency)
                with lease(self.config, self.job.target, self.job.state, self.lane_name) as held:
                    await self._ask_all(held)
            outcomes = self._finish()
        except BaseException as error:
            await self.reporter.tell("stopped" if isinstance(error, Stopped) else "failed")
            raise
        self.meter.outcomes = outcomes
        await self.reporter.tell("done")
        counts = ", ".join(f"{count} {name}" for name, count in outcomes.most_common() if count)
        self.say(f"done: {outcomes.total()} prompts ({counts})")

    def _count(self) -> int:
        """Count what there is and what is left; say both."""
        total, answered, totals = self.answers.count(self.job.prompts)
        self.meter.total = total
        self.meter.resume(totals.outcomes, totals.input_tokens, totals.output_tokens, self.account.spent.cost)
        self.say(f"{total} prompts, {answered} answered before, {total - answered} left")
        if self.answers.journal.damaged:
            self.say(
                f"warning: {self.answers.journal.damaged} damaged lines in the journal: those prompts are asked again"
            )
        return total - answered

    def _left(self) -> int:
        """Prompts that are not begun yet."""
        return self.meter.total - self.meter.outcomes.total() - self.pool.in_flight

    async def _ask_all(self, held: Lease) -> None:
        """Ask until every prompt has its outcome, or something stops the job."""
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with signals(stop):
            async with self._session() as self.transport:
                canary = Canary(self.config, self.target, self.adapter, self.transport, self.job.state, self.belonging)
                self.supervisor = supervisor = Supervisor(
                    self.config,
                    self.lane.concurrency,
                    held,
                    self.pool,
                    canary,
                    self.transport,
                    self.vouching,
                    self.say,
                )
                self.sender = Sender(self.settings, self.pool, self.transport)
                self.blame = Blame(self.settings, self.adapter, self.pool, self.transport, self.say, random.Random())
                self.backlog = Backlog(self._work(), self.clock, 2 * self.lane.concurrency)
                helpers = [
                    asyncio.create_task(helper)
                    for helper in (
                        supervisor.run(),
                        self._keep_saved(),
                        self.reporter.keep(lambda: bool(self.pool.ready())),
                    )
                ]
                workers: list[asyncio.Task] = []
                try:
                    while self.backlog.open:
                        workers = [asyncio.create_task(self._worker()) for _ in range(self.lane.concurrency)]
                        await first_trouble([stop, *helpers], workers)
                        if self.answers.journal.problem:
                            raise self.answers.journal.problem
                        # A bad canary puts prompts back into the backlog.
                        await first_trouble([stop, *helpers], [asyncio.create_task(supervisor.close())])
                    self.vouching.release()
                finally:
                    for task in (*helpers, *workers):
                        task.cancel()
                    await asyncio.gather(*helpers, *workers, return_exceptions=True)
                    self.account.save(give_back=True)
                    for reason, count in self.broken.most_common():
                        self.say(f"warning: {count} answers were thrown away: {reason}")

    def _session(self) -> HttpTransport:
        return HttpTransport(authorization(self.config.engine), hosted=self.adapter.hosted)

    def _work(self, wanted: Callable[[str], bool] | None = None) -> Iterator[Work]:
        for prompt in read_prompts(self.job.prompts, wanted or (lambda id: id not in self.answers)):
            partial = self.answers.partial.pop(prompt.id, None)
            yield Work(prompt, partial.turns, partial.part) if partial else Work(prompt)

    # --- one prompt ---

    async def _worker(self) -> None:
        # On a full disk nothing new is sent, and what is under way still goes into the journal's reserve.
        while not self.answers.journal.problem and (work := await self.backlog.get()) is not None:
            step = await self._advance(work)
            if step.kind == "again":
                self.backlog.again(work, step.delay)
                continue
            if step.completion is None:
                self.meter.add("over_budget", 0, 0)
            elif step.refused:
                number = self.vouching.arrived(step.endpoint)
                reason, stands = step.completion.reason or "", functools.partial(self._done, step)
                self.vouching.refused_work(step.endpoint, number, work.prompt.id, reason, stands)
            else:
                self._done(step)
            self.backlog.finished()

    def _done(self, step: Step) -> None:
        assert step.completion is not None
        ended = self.answers.done(step.completion, step.endpoint)
        self.meter.add(ended.outcome, ended.input_tokens, ended.output_tokens)

    async def _advance(self, work: Work) -> Step:
        """Ask turn after turn until the prompt is done, has to wait, or can't be paid (`done` without completion)."""
        while True:
            self._forget_tainted(work)
            request = self.dialogue.next_request(work)
            if isinstance(request, Step):
                return request
            if self.answers.journal.problem:
                return Step("again")
            while (reserved := self.account.reserve(len(request.prompt_ids), request.max_tokens)) == "wait":
                await asyncio.sleep(_BUDGET_SECONDS)
            if reserved == "never":
                return Step("done")
            step = await self._ask(work, request, Payment(self.account, self.meter, reserved))
            if self._forget_tainted(work):
                continue
            if step.turn is None:
                return step
            if step.kind == "part":
                self.answers.part(work.prompt.id, step.turn)
            else:
                self.answers.turn(work.prompt.id, step.turn)
                step.turn.pack()

    async def _ask(self, work: Work, request: Request, payment: Payment) -> Step:
        """Send one request and see what its answer or failure means."""
        expected = min(float(request.max_tokens), self.mean_output) + _PROMPT_COST * len(request.prompt_ids)
        with payment:
            server = await self.pool.acquire(expected, work.attempts.avoid)
            if not self._fits(request):
                self.pool.release(server, expected)
                return Step("again")
            begun = self.clock()
            payment.sent()
            reply = await self.sender.send(server, self.adapter.request(request), request.max_tokens, expected)
            result = reply if isinstance(reply, Failure) else self.adapter.read(request, reply, time.time())
            if isinstance(result, Answer):
                payment.answered(request, result)
                step = self._take_answer(work, request, server, result, self.clock() - begun)
                if isinstance(step, Step):
                    return step
                result = step
            else:
                payment.failed(result)
                if result.odd:
                    self.vouching.suspect(server.url)
                    self.broken[f"{server.url}: {result.reason}"] += 1
        next_try = await self.blame.next_try(server, request.id, begun, work.attempts, result)
        step = self.dialogue.tried(work, next_try)
        refused = isinstance(next_try, GivenUp) and next_try.refused
        if refused and step.completion is not None and not OUTCOMES[step.completion.outcome].answered:
            # A server that refuses everything is broken: a canary vouches for refusals as it does for answers.
            step.refused, step.endpoint = True, server.url
        else:
            self.meter.retried += 1
        return step

    def _fits(self, request: Request) -> bool:
        """Whether there is room for a request: since it was made, an endpoint may have come that holds less."""
        assert self.supervisor is not None
        shortest = self.supervisor.context_length
        if shortest is not None and shortest < self.dialogue.context_length:
            if self.dialogue.context_length - shortest > _KEPT_BACK:
                self.say(
                    f"warning: an endpoint serves a context of {shortest} tokens, the model holds "
                    f"{self.dialogue.context_length}: prompts that leave no room there are given up"
                )
            self.dialogue.context_length = shortest
        return len(request.prompt_ids) + request.max_tokens <= self.dialogue.context_length

    def _take_answer(
        self, work: Work, request: Request, server: PooledEndpoint, answer: Answer, seconds: float
    ) -> Step | Failure:
        if self.belonging and (failure := self.belonging.problem(server.url, work.prompt.id, request, answer)):
            return failure
        step = self.dialogue.answered(work, request, answer, server.url, seconds)
        if isinstance(step, Failure):
            return step
        tokens = len(answer.output_ids) if answer.output_ids is not None else answer.output_tokens or 0
        self.pool.succeeded(server, tokens, seconds)
        self.mean_output += 0.02 * (tokens - self.mean_output)
        step.endpoint = server.url
        odd = step.kind == "again" or (step.completion is not None and step.completion.outcome == "repetition")
        self.vouching.arrived(server.url)
        self.vouching.answered(server.url, odd=odd)
        work.attempts.avoid = None
        return step

    def _forget_tainted(self, work: Work) -> bool:
        """Start a prompt anew whose turns came from a broken engine. True when it was one."""
        if not self.vouching.forget_tainted(work.prompt.id):
            return False
        work.turns, work.part, work.prompt_ids, work.resamples = [], None, None, 0
        return True

    # --- helpers beside the workers ---

    async def _keep_saved(self) -> None:
        """fsync the journal in groups, and save the budget's account. On a full disk see the requests in flight out."""
        journal = self.answers.journal
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await asyncio.to_thread(journal.sync)
            try:
                self.account.save()
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                journal.problem = journal.problem or UserError(
                    f"{self.job.state}: {error.strerror}: the job stops; what has arrived is kept. "
                    "Free some space and run again"
                )
            if journal.problem:
                end = self.clock() + _DRAIN_SECONDS
                while self.pool.in_flight and self.clock() < end:
                    await asyncio.sleep(0.1)
                raise journal.problem

    # --- the end ---

    def _finish(self) -> Counter[str]:
        def unpaid(prompt_id: str) -> str | None:
            return self.account.reason() if self.account.exhausted else None

        facts = self.supervisor.facts if self.supervisor else None
        provenance = shard_provenance(self.job, self.target, facts)
        return finish(self.answers, self.job.prompts, self.job.output, unpaid, provenance)
