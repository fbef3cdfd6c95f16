"""How well jobs fill a fleet: the stage's own code against simulated servers, in virtual time.

    python -m benchmarks.fleet

Eight servers decode up to 72 answers each, with long-tailed lengths; one is slow, one dies on the way. Several shard
jobs share them through their leases, each with its own pool, as in a run: everything of the stage is real (backlog,
pool, dialogue, journal, canaries, supervision, finished shard) but the clock and the servers. The makespan is
compared with the lower bound that no client can beat: all tokens, and those that died with the server, at the full
speed of every server as long as it lived.

Answers are a sixteenth as long as in the reference run (mean 2,712 tokens) and servers decode a sixteenth as fast:
the same seconds, less memory.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import heapq
import io
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from benchmarks.virtual_time import VirtualLoop
from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.completions.generate import Generation
from scripts.lib.completions.identity import identity
from scripts.lib.completions.job import ShardJob
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core.records import Message, Prompt, write_rows
from scripts.lib.engines.base import Call, Failure, Reply
from scripts.lib.target.model import Target
from scripts.lib.target.output import add_text
from scripts.lib.target.prepare import prepare_target

SCALE = 16
SLOTS = 72
MEAN_TOKENS, MAX_TOKENS, SPREAD = 2712 // SCALE, 10_240 // SCALE, 1.0
# Seconds of a decoding step with n answers running: 72 give 1,188 tokens/s, as measured on the reference GPUs.
STEP_BASE, STEP_EACH = 0.016 * SCALE, 0.00062 * SCALE
STOP = 2


def step_seconds(running: int, slowness: float) -> float:
    return slowness * (STEP_BASE + STEP_EACH * running)


@dataclass(order=True)
class Running:
    end: float  # in steps of the server's life
    serial: int
    tokens: int = field(compare=False)
    started: float = field(compare=False)
    done: asyncio.Future = field(compare=False)


class SimulatedServer:
    """Continuous batching: all that run take a step together; more wait in a queue, first come first served."""

    def __init__(self, url: str, slowness: float) -> None:
        self.url, self.slowness = url, slowness
        self.running: list[Running] = []  # a heap by the step at which they end
        self.queue: list[tuple[int, asyncio.Future]] = []
        self.steps = 0.0
        self.as_of = 0.0
        self.alive = True
        self.generated = 0.0
        self.lost_tokens = 0.0
        self.died_at: float | None = None
        self.lives_until: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._serial = itertools.count()

    @property
    def capacity(self) -> float:
        """Tokens per second with all slots running."""
        return SLOTS / step_seconds(SLOTS, self.slowness)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.running:
            steps = (now - self.as_of) / step_seconds(len(self.running), self.slowness)
            self.steps += steps
            self.generated += steps * len(self.running)
        self.as_of = now

    def _plan(self) -> None:
        """Fill free slots and set the timer for the next answer that ends."""
        while self.queue and len(self.running) < SLOTS:
            tokens, done = self.queue.pop(0)
            if not done.done():
                heapq.heappush(self.running, Running(self.steps + tokens, next(self._serial), tokens, self.steps, done))
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if self.running:
            seconds = (self.running[0].end - self.steps) * step_seconds(len(self.running), self.slowness)
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._end)

    def _end(self) -> None:
        self._advance()
        while self.running and (self.running[0].end <= self.steps + 1e-6 or self.running[0].done.done()):
            ended = heapq.heappop(self.running)
            if not ended.done.done():
                ended.done.set_result(True)
        self._plan()

    async def generate(self, tokens: int) -> bool:
        """True when the answer is made, False when the server died meanwhile."""
        self._advance()
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.queue.append((tokens, done))
        self._plan()
        return await done

    def die(self) -> None:
        self._advance()
        self.alive, self.died_at = False, self.as_of
        self.lost_tokens = sum(self.steps - one.started for one in self.running)
        for done in [one.done for one in self.running] + [done for _, done in self.queue]:
            if not done.done():
                done.set_result(False)
        self.running, self.queue = [], []
        if self._timer:
            self._timer.cancel()


class SimulatedTransport:
    """Takes the place of the transport: SGLang's wire shapes, no bytes moved."""

    def __init__(self, fleet: dict[str, SimulatedServer]) -> None:
        self.fleet = fleet

    async def __aenter__(self) -> "SimulatedTransport":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def call_within(self, seconds: float, url: str, call: Call) -> Reply | Failure:
        async with asyncio.timeout(seconds):
            return await self.call(url, call)

    async def call(self, url: str, call: Call) -> Reply | Failure:
        server = self.fleet[url]
        if not server.alive:
            return Failure("wait", "can't connect: Connection refused")
        if call.path == "/metrics":
            text = (
                f"sglang:num_running_reqs {len(server.running)}\nsglang:num_queue_reqs {len(server.queue)}\n"
                f"sglang:generation_tokens_total {server.generated}\n"
            )
            return Reply(200, {}, text.encode())
        if call.method == "GET":
            return Reply(200, {}, orjson.dumps({"data": [{"id": "simulated"}], "version": "0"}))
        body = orjson.loads(call.body or b"")
        ids = answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        if not await server.generate(len(ids)):
            return Failure("retry", "the connection broke", billed=True)
        finish = {"type": "stop", "matched": STOP} if ids[-1] == STOP else {"type": "length"}
        meta = {"finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids)}
        return Reply(200, {}, orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta}))

    async def abort(self, url: str, call: Call | None) -> None:
        pass


def answer(prompt_ids: list[int], limit: int) -> list[int]:
    """Ids whose number is log-normal with the reference run's mean and cap, by the prompt."""
    dice = random.Random(hashlib.blake2b(str(prompt_ids).encode(), digest_size=8).digest())
    median = MEAN_TOKENS / 2.718281828 ** (SPREAD**2 / 2)
    length = max(4, round(dice.lognormvariate(0, SPREAD) * median))
    ids = [dice.randrange(1_000, 20_000)] * min(length, limit)
    ids[::2] = [dice.randrange(1_000, 20_000) for _ in ids[::2]]  # no repetition
    if length < limit:
        ids[-1] = STOP
    return ids


class Job(Generation):
    """A shard's job on simulated servers, in the loop's time."""

    fleet: dict[str, SimulatedServer]

    def _session(self) -> SimulatedTransport:  # type: ignore[override]
        return SimulatedTransport(self.fleet)


def settings(urls: list[str], jobs: int, concurrency: int) -> Config:
    datasets = {f"d{number}": {"class": "B", "source": "x"} for number in range(jobs)}
    return parse_config(
        {
            "model": {"name": "embedded:smollm2", "context_length": 2048},
            "engine": {"kind": "sglang", "endpoints": urls, "served_model": "simulated"},
            "lanes": {"short": {"max_tokens": MAX_TOKENS, "concurrency": concurrency}},
            "shards": 1,
            "datasets": datasets,
            "transport": {"min_tokens_per_second": 2.0 / SCALE, "ramp_per_second": 50},
        },
        "benchmark",
    )


def write_prompts(path: Path, dataset: str, count: int) -> None:
    rows = (
        Prompt(
            hashlib.sha256(f"{dataset} {row}".encode()).hexdigest()[:32],
            dataset,
            f"x:{row}",
            str(row),
            [Message("user", f"Question {row} of {dataset}.")],
        )
        for row in range(count)
    )
    write_rows(path, Prompt, rows, {"stage": "prompts"})


def lower_bound(tokens: float, fleet: dict[str, SimulatedServer]) -> float:
    """Seconds that the fleet takes for `tokens`, every server full as long as it lives."""
    work, seconds = tokens, 0.0
    deaths = sorted(server.died_at for server in fleet.values() if server.died_at is not None)
    for death in [*deaths, float("inf")]:
        capacity = sum(s.capacity for s in fleet.values() if s.died_at is None or s.died_at >= death)
        if work <= capacity * (death - seconds):
            return seconds + work / capacity
        work -= capacity * (death - seconds)
        seconds = death
    raise AssertionError("unreachable")


async def simulate(
    folder: Path, target: Target, target_folder: Path, jobs: int, prompts: int, scenario: "Scenario"
) -> tuple[float, float, float]:
    """Returns (makespan, lower bound, share of tokens made twice)."""
    loop = asyncio.get_running_loop()
    slowness = [2.5 if scenario.slow and number == 0 else 1.0 for number in range(8)]
    fleet = {f"http://s{n}": SimulatedServer(f"http://s{n}", slow) for n, slow in enumerate(slowness)}
    config = settings(list(fleet), jobs, scenario.concurrency)
    if scenario.dies_at is not None:
        loop.call_later(scenario.dies_at, fleet["http://s1"].die)
    runs = []
    for number in range(jobs):
        dataset = f"d{number}"
        shard = ShardJob(
            config,
            dataset,
            "000",
            target_folder,
            folder / "prompts" / dataset / "000.parquet",
            folder / "completions" / dataset / "000.parquet",
            folder / "state",
        )
        write_prompts(shard.prompts, dataset, prompts)
        texts = functools.partial(add_text, target)
        answered = ShardAnswers(shard.state, dataset, "000", identity(config, dataset, target), texts)
        job = Job(shard, target, answered, loop.time)
        job.fleet = fleet
        runs.append((job, answered))
    await asyncio.gather(*(job.run() for job, _ in runs))
    makespan = loop.time()
    wanted = 0
    for job, answered in runs:
        wanted += answered.finished.totals.output_tokens or job.meter.output_tokens
        answered.close()
    made = sum(server.generated for server in fleet.values())
    lost = sum(server.lost_tokens for server in fleet.values())
    return makespan, lower_bound(wanted + lost, fleet), (made - wanted - lost) / wanted


@dataclass(frozen=True)
class Scenario:
    name: str
    slow: bool = False
    dies_at: float | None = None
    concurrency: int = 8 * SLOTS + 64


SCENARIOS = (
    Scenario("all well"),
    Scenario("one slow"),
    Scenario("one dies"),
    Scenario("one slow, one dies"),
)


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """What the jobs say, kept for when something goes wrong."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        yield said


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40_000, help="prompts in all")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 8], help="jobs that share the fleet")
    parser.add_argument("--scenario", help="only this one")
    parser.add_argument("--concurrency", type=int, default=8 * SLOTS + 64, help="the lane's ceiling")
    parser.add_argument("--verbose", action="store_true", help="show what the jobs say")
    options = parser.parse_args()
    half_time = options.prompts * MEAN_TOKENS / (8 * SLOTS / step_seconds(SLOTS, 1.0)) / 2
    print(f"{options.prompts} prompts of {MEAN_TOKENS * SCALE} tokens on average; 8 servers, {SLOTS} at once each\n")
    print("| scenario | jobs | makespan | lower bound | ratio | made in vain | simulated in |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        target_folder = Path(name) / "target"
        target = prepare_target(settings(["http://x"], 1, 1), target_folder)
        for scenario in SCENARIOS:
            if options.scenario not in (None, scenario.name):
                continue
            scenario = Scenario(
                scenario.name,
                "slow" in scenario.name,
                half_time if "dies" in scenario.name else None,
                options.concurrency,
            )
            for jobs in options.jobs:
                begun = time.perf_counter()
                with (
                    tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
                    contextlib.nullcontext() if options.verbose else quiet(),
                    asyncio.Runner(loop_factory=VirtualLoop) as runner,
                ):
                    makespan, bound, vain = runner.run(
                        simulate(Path(folder), target, target_folder, jobs, options.prompts // jobs, scenario)
                    )
                print(
                    f"| {scenario.name} | {jobs} | {makespan:,.0f} s | {bound:,.0f} s | {makespan / bound:.3f} | "
                    f"{vain:.2%} | {time.perf_counter() - begun:.0f} s |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
