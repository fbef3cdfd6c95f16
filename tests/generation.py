"""Runs of `generate_completions` against fault servers, and the proof that they lost nothing and paid nothing twice."""

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from scripts.lib.completions.journal import scan
from scripts.lib.completions.journal_records import Done
from scripts.lib.config.file import parse_config
from scripts.lib.core.records import Completion, Message, Prompt, read_rows, write_rows
from scripts.lib.target.model import Target, load_target
from scripts.lib.target.prepare import prepare_target
from tests.fault_server.answers import Answers, digest, text_of

PROJECT = Path(__file__).resolve().parents[1]
MODEL = {"name": "embedded:smollm2", "context_length": 2048}
DATASET, SHARD = "chat", "000"
WORDS = [
    "river",
    "stone",
    "lamp",
    "garden",
    "seven",
    "quiet",
    "harbour",
    "glass",
    "winter",
    "copper",
    "field",
    "engine",
    "letter",
    "north",
    "paper",
    "cloud",
]


@functools.cache
def target_folder() -> Path:
    """The embedded model's target, prepared once for all tests of a process."""
    folder = Path(tempfile.mkdtemp(prefix="target-"))
    prepare_target(parse_config({"model": MODEL, "datasets": {"x": {"class": "B", "source": "x"}}}, "test"), folder)
    return folder


def prompts(count: int, seed: int = 0, turns: int = 1) -> list[Prompt]:
    """Different prompts that depend on nothing but the arguments."""
    made = []
    for row in range(count):
        dice = random.Random(f"{seed} {row}")
        messages = [
            Message("user", f"Tell me about {' '.join(dice.choices(WORDS, k=dice.randint(3, 30)))}, part {row}.{turn}.")
            for turn in range(turns)
        ]
        prompt_id = hashlib.sha256(f"{seed} {row}".encode()).hexdigest()[:32]
        made.append(Prompt(prompt_id, DATASET, f"made.jsonl:{row + 1}", prompt_id, messages))
    return made


_TRUSTING = ssl._create_unverified_context()

# --- servers ------------------------------------------------------------------------------------


class Server:
    """A fault server in its own process."""

    def __init__(self, name: str, log: Path, **options: Any) -> None:
        self.log = log
        arguments = ["--until-stdin-closes", f"--name={name}", f"--log={log}"]
        arguments += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault_server", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, f"the fault server did not start: exit code {self.process.wait()}"
        self._read = self._count = 0

    def control(self, **orders: Any) -> None:
        request = urllib.request.Request(f"{self.url}/control", orjson.dumps(orders))
        urllib.request.urlopen(request, timeout=10, context=_TRUSTING).close()

    def stats(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10, context=_TRUSTING) as response:
            return json.load(response)

    def served(self) -> list[dict]:
        """What it has logged: all generations that it finished."""
        return [orjson.loads(line) for line in self.log.read_bytes().splitlines()] if self.log.exists() else []

    def count(self) -> int:
        """How many generations it has finished; cheap enough to be asked all the time."""
        if self.log.exists():
            with open(self.log, "rb") as file:
                file.seek(self._read)
                new = file.read()
            self._read += len(new)
            self._count += new.count(b"\n")
        return self._count

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def servers(folder: Path, count: int, answers: Answers, **options: Any) -> Iterator[list[Server]]:
    """`count` servers of one fleet; per-server values are given as lists."""
    options |= {"seed": answers.seed, "median_tokens": answers.median_tokens, "spread": answers.spread}
    running: list[Server] = []
    try:
        for number in range(count):
            own = {key: value[number] if isinstance(value, list) else value for key, value in options.items()}
            own = {key: value for key, value in own.items() if value is not None}
            running.append(Server(f"s{number}", folder / f"served-{number}.jsonl", **own))
        yield running
    finally:
        for server in running:
            server.end()


def faults(rates: dict[str, float]) -> str:
    return ",".join(f"{name}={rate}" for name, rate in rates.items())


# --- jobs ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """One shard, its folder, and the jobs that work on it."""

    folder: Path
    rows: list[Prompt]
    urls: list[str]
    kind: str = "llamacpp"
    max_tokens: int = 400
    concurrency: int = 32
    answers: Answers = field(default_factory=Answers)
    config: dict[str, Any] = field(default_factory=dict)  # laid over the defaults below, by section

    def __post_init__(self) -> None:
        self.prompts = self.folder / "prompts" / DATASET / f"{SHARD}.parquet"
        self.output = self.folder / "completions" / DATASET / f"{SHARD}.parquet"
        self.state = self.folder / "state"
        self.journal = self.state / "journals" / DATASET / f"{SHARD}.journal"
        self.write_prompts(self.target.provenance())
        self.write_config()

    def write_prompts(self, target: dict[str, Any]) -> None:
        """Write the shard as stage 1 does for the target of this provenance."""
        for row in self.rows:
            row.prompt_ids = self.target.render(row.messages[:1])
            row.prompt_tokens = len(row.prompt_ids)
        write_rows(self.prompts, Prompt, self.rows, {"stage": "prompts", "target": target})

    def write_config(self) -> None:
        """Write the configuration that the next jobs read."""
        values: dict[str, Any] = {
            "model": MODEL,
            "engine": {"kind": self.kind, "endpoints": self.urls, "served_model": "target"},
            "lanes": {"short": {"max_tokens": self.max_tokens, "concurrency": self.concurrency}},
            "shards": 1,
            "datasets": {DATASET: {"class": "B", "source": "made.jsonl"}},
            # Seconds instead of minutes, so that silence is noticed within a test.
            "transport": {
                "base_seconds": 2,
                "min_tokens_per_second": 400,
                "idle_seconds": 3,
                "backoff_first": 0.05,
                "backoff_cap": 0.5,
                "ramp_per_second": 1000,
            },
        }
        for section, settings in self.config.items():
            values[section] = {**values.get(section, {}), **settings}
        self.config_path = self.folder / "config.json"
        self.config_path.write_bytes(orjson.dumps(values))

    @property
    def target(self) -> Target:
        return load_target(target_folder())

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "scripts.generate_completions", "--config", str(self.config_path)),
            *("--dataset", DATASET, "--shard", SHARD, "--target", str(target_folder())),
            *("--prompts", str(self.prompts), "--output", str(self.output), "--state", str(self.state)),
        ]

    def start(self, **options: Any) -> subprocess.Popen:
        """A job in a process of its own; its stderr goes to `job.log` in the folder."""
        with open(self.folder / "job.log", "ab") as log:
            return subprocess.Popen(self.command(), stderr=log, cwd=PROJECT, start_new_session=True, **options)

    def finish(self, timeout: float = 300, **options: Any) -> int:
        """Run a job to its end; returns its exit code."""
        process = self.start(**options)
        try:
            return process.wait(timeout)
        finally:
            kill(process)

    def log(self) -> str:
        return (self.folder / "job.log").read_text(errors="replace")

    def journalled(self) -> set[str]:
        """Ids of prompts whose outcome is safe: in the journal or in the finished shard."""
        done: set[str] = set()
        if self.journal.exists():
            done |= {line.record.prompt_id for line in scan(self.journal) if isinstance(line.record, Done)}
        finished = self.state / "completions" / DATASET / f"{SHARD}.parquet"
        if finished.exists():
            done |= {row.id for row in read_rows(finished, Completion)}
        return done

    def finishing(self) -> bool:
        """Whether a job is writing the finished shard now."""
        folders = (self.state / "completions" / DATASET, self.output.parent)
        return any(folder.exists() and any(folder.glob(".*.partial")) for folder in folders)

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Digest of a prompt's ids, as the servers log it, by prompt id (first turns)."""
        return {row.id: digest(self.target.render(row.messages[:1])) for row in self.rows}

    def expected(self, prompt_ids: list[int]) -> list[int]:
        """The ids that the fleet gives to a prompt: what the corpus has to hold."""
        ids, finish = self.answers(prompt_ids, min(self.max_tokens, self.target.context_length - len(prompt_ids)))
        if self.kind != "openai":
            return ids
        stop = [self.answers.stop_id] if finish == "stop" else []
        return self.target.encode(text_of([token for token in ids if token != self.answers.stop_id])) + stop

    def completions(self) -> list[Completion]:
        return list(read_rows(self.output, Completion))

    def check(self) -> Counter[str]:
        """Every prompt once, in order, with exactly the ids that were to be. Returns the outcomes."""
        rows = self.completions()
        assert [row.id for row in rows] == [row.id for row in self.rows]
        for row, prompt in zip(rows, self.rows):
            history: list[Message] = []
            for message, turn in zip(prompt.messages, row.turns):
                history.append(message)
                assert turn.prompt_ids == self.target.render(history), prompt.source
                assert turn.output_ids == self.expected(turn.prompt_ids), (prompt.source, turn.endpoint)
                history.append(Message("assistant", turn.content))
        return Counter(row.outcome for row in rows)


# Faults that leave a whole answer: a prompt that got one may not be asked again.
HARMLESS = (
    None,
    "leading_ws",
    "unasked_encoding",
    "sse_split_utf8",
    "sse_comment",
    "usage_missing",
    "usage_wrong",
    "reply_doubled",
    "reply_doubled_late",
)


def answered_whole(run: Run, fleet: list[Server]) -> Counter[str]:
    """How often each prompt (by digest of its ids) got a whole, good answer. Needs prompts of one turn."""
    known = set(run.digests.values())
    return Counter(
        line["prompt"]
        for server in fleet
        for line in server.served()
        if line["prompt"] in known and line["delivered"] and line["fault"] in HARMLESS
    )


def spent_in_vain(run: Run, fleet: list[Server]) -> int:
    """Generations that were made beyond one per prompt."""
    known = set(run.digests.values())
    return sum(line["prompt"] in known for server in fleet for line in server.served()) - len(run.rows)


def check_failures(run: Run, fleet: list[Server]) -> None:
    """Every prompt without an answer met a fault that no resend cures, as often as it takes."""
    digests, met = run.digests, defaultdict(Counter)
    for server in fleet:
        for line in server.served():
            met[line["prompt"]][line["fault"]] += 1
    for row in run.completions():
        faults = met[digests[row.id]]
        if row.outcome == "empty":
            assert faults["content_null_stop"] >= 3, row
        elif row.outcome == "rejected":
            assert faults["last_batch_lost"] >= 2, row
        else:
            assert row.outcome in ("ok", "length"), row


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a job and everything in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def generated(fleet: list[Server]) -> int:
    return sum(server.count() for server in fleet)


def await_progress(
    process: subprocess.Popen, reached: Callable[[], bool], patience: float = 120.0, lacking: str = "no progress"
) -> bool:
    """Look until `reached()` is true; False when the job ended first. `lacking`: what is missing when it never is."""
    end = time.monotonic() + patience
    while not reached():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, lacking
        time.sleep(0.002)
    return True


def kill_and_resume(run: Run, fleet: list[Server], during: int, finishing: int, seed: int) -> None:
    """Kill jobs at seeded moments, `during` generation and while `finishing`, then let one end; check everything.

    Nothing that was journalled at a kill is ever generated again, and what was lost was in flight.
    """
    dice, by_id = random.Random(seed), run.digests
    history: list[tuple[set[str], list[int]]] = []  # at each kill: what was safe, how much was generated
    step = 2 * len(run.rows) // (during + 1)
    for number in range(during + finishing):
        goal = generated(fleet) + (1 if dice.random() < 0.2 else dice.randint(1, step))
        moment = (lambda goal=goal: generated(fleet) >= goal) if number < during else run.finishing
        process = run.start()
        try:
            await_progress(process, moment)
        finally:
            kill(process)
        safe = {by_id[prompt_id] for prompt_id in run.journalled()}
        lost = answered_whole(run, fleet).keys() - safe
        assert len(lost) <= run.concurrency, f"{len(lost)} answers were not journalled"
        history.append((safe, [server.count() for server in fleet]))
    assert run.finish() == 0, run.log()
    run.check()
    check_failures(run, fleet)
    for safe, marks in history:
        for server, mark in zip(fleet, marks):
            again = {line["prompt"] for line in server.served()[mark:]} & safe
            assert not again, f"{len(again)} prompts were generated again though they were journalled"
    output, made = run.output.read_bytes(), generated(fleet)
    assert run.finish() == 0, run.log()
    assert (run.output.read_bytes(), generated(fleet)) == (output, made), "a finished shard was made again"
