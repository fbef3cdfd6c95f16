"""What the client costs: CPU time per completion and memory, beside a raw aiohttp loop, on one core.

    python -m benchmarks.client
    python -m benchmarks.client --memory

The server (benchmarks.null_server, on another core) answers every request with the same ids after a fixed time, so
that the asked number is really in flight. Contenders, each in a process of its own, in turns:

- `raw`: an aiohttp loop over ready ids: body to JSON, POST, read, JSON to Python. It keeps nothing
- `raw script`: the least that a script has to do for the same rows: it renders and tokenizes each prompt, asks,
  turns the ids into text and appends a JSON line. No deadline, no retry, no checksum, no fsync
- `ours`: `generate_completions` itself: prompts from Parquet, template, ids, deadlines, outcome, text, journal with
  checksums and fsync, progress; then the finished shard as Parquet, which is timed apart
- `AsyncOpenAI`: the client that most scripts use, where the package `openai` is installed

CPU time is what the kernel counts for the process (user and system, all threads), without imports and loading.
"""

import argparse
import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from scripts.lib.completions import generate as generation
from scripts.lib.completions.generate import generate
from scripts.lib.completions.job import ShardJob
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core.records import Message, Prompt, read_rows, write_rows
from scripts.lib.target.model import Target, load_target
from scripts.lib.target.prepare import prepare_target

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
PROMPT_WORDS = 90  # about as many tokens as the reference run's prompts have: 112


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def config(url: str, in_flight: int) -> Config:
    return parse_config(
        {
            "model": {"name": "embedded:smollm2", "context_length": 8192},
            "engine": {"kind": "sglang", "endpoints": [url], "served_model": "null"},
            "lanes": {"short": {"max_tokens": 4096, "concurrency": in_flight}},
            "shards": 1,
            "datasets": {"chat": {"class": "B", "source": "x"}},
            "transport": {"ramp_per_second": 1e6},
        },
        "benchmark",
    )


def write_prompts(path: Path, count: int, target: Target) -> None:
    """A shard as stage 1 writes it."""
    dice = random.Random(0)

    def rows() -> Iterator[Prompt]:
        for row in range(count):
            prompt_id = hashlib.sha256(str(row).encode()).hexdigest()[:32]
            messages = [Message("user", " ".join(dice.choices(WORDS, k=PROMPT_WORDS)))]
            ids = target.render(messages)
            yield Prompt(prompt_id, "chat", f"x:{row}", prompt_id, messages, prompt_tokens=len(ids), prompt_ids=ids)

    write_rows(path, Prompt, rows(), {"stage": "prompts", "target": target.provenance()})


# --- contenders: each returns CPU seconds per completion, by part ---------------------------------


def ours(folder: Path, url: str, in_flight: int, count: int) -> dict[str, float]:
    shard = ShardJob(
        config(url, in_flight),
        "chat",
        "000",
        folder / "target",
        folder / "prompts.parquet",
        folder / "out.parquet",
        folder / "state",
    )
    load_target(shard.target)
    marks: list[float] = []
    finish = generation.finish

    def timed(*arguments: Any, **named: Any) -> Any:
        marks.append(cpu())
        return finish(*arguments, **named)

    generation.finish = timed  # the one seam between answering and finishing
    begun = cpu()
    generate(shard)
    end = cpu()
    return {"answering": (marks[0] - begun) / count, "finished shard": (end - marks[0]) / count}


def raw(folder: Path, url: str, in_flight: int, count: int) -> dict[str, float]:
    prompts = [prompt.prompt_ids for prompt in read_prompts(folder)]

    async def ask(session: aiohttp.ClientSession, prompt_ids: list[int]) -> None:
        await post(session, url, prompt_ids)

    return {"answering": raw_loop(in_flight, count, prompts, ask)}


def raw_script(folder: Path, url: str, in_flight: int, count: int) -> dict[str, float]:
    target, prompts = load_target(folder / "target"), list(read_prompts(folder))
    with open(folder / "answers.jsonl", "wb") as output:

        async def ask(session: aiohttp.ClientSession, prompt: Prompt) -> None:
            prompt_ids = target.render(prompt.messages)
            ids = (await post(session, url, prompt_ids))["output_ids"]
            row = {"id": prompt.id, "prompt_ids": prompt_ids, "output_ids": ids, "text": target.decode(ids)}
            output.write(orjson.dumps(row) + b"\n")

        return {"answering": raw_loop(in_flight, count, prompts, ask)}


def read_prompts(folder: Path) -> Iterator[Prompt]:
    return read_rows(folder / "prompts.parquet", Prompt)


async def post(session: aiohttp.ClientSession, url: str, prompt_ids: list[int]) -> dict:
    body = orjson.dumps({"input_ids": prompt_ids, "sampling_params": {"max_new_tokens": 4096, "temperature": 0.7}})
    async with session.post(f"{url}/generate", data=body, headers={"Content-Type": "application/json"}) as response:
        return orjson.loads(await response.read())


def raw_loop(in_flight: int, count: int, items: list, ask: Callable[..., Awaitable]) -> float:
    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await in_turn(in_flight, items, lambda item: ask(session, item))

    begun = cpu()
    asyncio.run(run())
    return (cpu() - begun) / count


def async_openai(folder: Path, url: str, in_flight: int, count: int) -> dict[str, float]:
    """Against the same server, whose answer the client takes for an (odd) completion."""
    import openai

    async def run() -> None:
        # Its own timeout is 5 s to connect, in which it can't open 2,000 connections.
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=600)
        await in_turn(
            in_flight,
            range(count),
            lambda number: client.chat.completions.create(
                model="null", messages=[{"role": "user", "content": f"{number} " * PROMPT_WORDS}], max_tokens=4096
            ),
        )

    begun = cpu()
    asyncio.run(run())
    return {"answering": (cpu() - begun) / count}


async def in_turn(in_flight: int, items: Iterable[Any], ask: Callable[..., Awaitable]) -> None:
    """`in_flight` workers over the items."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await ask(item)

    await asyncio.gather(*(worker() for _ in range(in_flight)))


CONTENDERS = {"raw": raw, "raw script": raw_script, "ours": ours, "AsyncOpenAI": async_openai}


# --- the bench ----------------------------------------------------------------------------------


def measure(contender: str, count: int, in_flight: int, tokens: int, prompts: Path, target: Path, delay: float) -> dict:
    """Run one contender in a process of its own, on core 0; the server on core 1."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.null_server", "--tokens", str(tokens), "--delay", str(delay)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        pin(server.pid, -1)
        with tempfile.TemporaryDirectory(dir=prompts.parent) as name:
            folder = Path(name)
            (folder / "target").symlink_to(target)
            (folder / "prompts.parquet").symlink_to(prompts)
            arguments = [contender, str(folder), url, str(in_flight), str(count)]
            client = subprocess.run(
                [sys.executable, "-m", "benchmarks.client", "--contender", *arguments],
                capture_output=True,
                check=False,
            )
            if client.returncode:
                raise SystemExit(client.stderr.decode())
            return json.loads(client.stdout)
    finally:
        server.kill()
        server.wait()


def pin(process: int, core: int) -> None:
    """Bind a process to one of our cores, counted from either end."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(process, {sorted(os.sched_getaffinity(0))[core]})


def contend(contender: str, folder: str, url: str, in_flight: str, count: str) -> None:
    """What the process of one contender does."""
    pin(0, 0)
    result = CONTENDERS[contender](Path(folder), url, int(in_flight), int(count))
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client", description=__doc__.splitlines()[0])
    parser.add_argument("--contender", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=20_000, help="completions of each measurement")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[128, 2_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="peak memory from 10,000 to 200,000 prompts instead")
    parser.add_argument("--folder", type=Path, help="where the journals go; default: the temporary folder")
    options = parser.parse_args()
    if options.contender:
        contend(*options.contender)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        prepare_target(config("http://x", 1), folder / "target")
        (memory if options.memory else speed)(options, folder)


def speed(options: argparse.Namespace, folder: Path) -> None:
    prompts = folder / "prompts.parquet"
    write_prompts(prompts, options.count, load_target(folder / "target"))
    names = [name for name in CONTENDERS if name != "AsyncOpenAI" or importlib.util.find_spec("openai")]
    print(f"{options.count} completions of {options.tokens} tokens, median of {options.rounds} rounds\n")
    print("| in flight | contender | CPU ms per completion | times raw | times script | finished shard, ms | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for in_flight in options.in_flight:
        rounds: dict[str, list[dict]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                # So long that a client at 1 ms each has all of them out.
                delay = in_flight / 1_000
                rounds[name].append(
                    measure(name, options.count, in_flight, options.tokens, prompts, folder / "target", delay)
                )
        base, script = (
            statistics.median(result["answering"] for result in rounds[name]) for name in ("raw", "raw script")
        )
        for name in names:
            answering = statistics.median(result["answering"] for result in rounds[name])
            finishing = statistics.median(result.get("finished shard", 0.0) for result in rounds[name])
            peak = statistics.median(result["peak_mb"] for result in rounds[name])
            print(
                f"| {in_flight} | {name} | {answering * 1e3:.3f} | {answering / base:.2f} | "
                f"{answering / script:.2f} | "
                f"{f'{finishing * 1e3:.3f}' if finishing else ''} | {peak:.0f} |",
                flush=True,
            )


def memory(options: argparse.Namespace, folder: Path) -> None:
    print("| prompts | peak MB |\n|---|---|")
    for count in (10_000, 50_000, 200_000):
        prompts = folder / f"prompts-{count}.parquet"
        write_prompts(prompts, count, load_target(folder / "target"))
        result = measure("ours", count, 128, 64, prompts, folder / "target", 0.0)
        print(f"| {count:,} | {result['peak_mb']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
