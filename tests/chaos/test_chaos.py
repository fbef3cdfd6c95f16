"""Generation under fire: everything that can be cured goes wrong at once, servers die and hang, jobs are killed, disks
fill up; and the corpus holds exactly what it would hold on a quiet day.

    python -m pytest -m chaos tests/chaos
"""

import contextlib
import random
import subprocess
from pathlib import Path

import pytest

from tests.fault_server.answers import Answers
from tests.fault_server.faults import CURABLE
from tests.generation import (
    Run,
    answered_whole,
    await_progress,
    check_failures,
    faults,
    generated,
    kill,
    kill_and_resume,
    prompts,
    servers,
    spent_in_vain,
    target_folder,
)

pytestmark = pytest.mark.chaos

# (kind, dialect of the servers, prompts)
KINDS = [
    ("sglang", "sglang", 1_000),
    ("llamacpp", "llamacpp", 400),
    ("vllm", "vllm", 400),
    ("openai", "openrouter", 400),
]


@pytest.mark.parametrize(("kind", "dialect", "count"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_every_curable_fault_while_one_server_dies_and_one_hangs(
    kind: str, dialect: str, count: int, tmp_path: Path
) -> None:
    """Three servers, each fault at 1 % (5 % for one in ten); one is killed and one hangs after a fifth of the prompts."""
    dice = random.Random(f"rates {kind}")
    answers = Answers(11)
    rates = {name: 0.05 if dice.random() < 0.1 else 0.01 for name in CURABLE}
    if kind == "openai":
        del rates["sse_split_utf8"]  # adds characters to the text, which there is the answer
    options = {
        "dialect": dialect,
        "tokens_per_second": 2_000,
        "faults": faults(rates),
        "target": target_folder() if kind == "openai" else None,
    }
    with servers(tmp_path, 3, answers, **options) as fleet:
        suffix = "/v1" if kind == "openai" else ""
        run = Run(
            tmp_path,
            prompts(count),
            [server.url + suffix for server in fleet],
            kind=kind,
            concurrency=64,
            answers=answers,
            config={"transport": {"attempts": 20}},
        )
        job = run.start()
        try:
            assert await_progress(job, lambda: generated(fleet) >= count // 5), run.log()
            fleet[0].process.kill()
            fleet[1].control(hang=True)
            assert job.wait(400) == 0, run.log()
        finally:
            kill(job)
        outcomes = run.check()
        assert outcomes.total() == count
        assert outcomes["ok"] + outcomes["length"] >= count * 0.995, outcomes
        check_failures(run, fleet)
        # Whole answers that came twice can only be those that were broken off when a server hung.
        twice = sum(times - 1 for times in answered_whole(run, fleet).values() if times > 1)
        assert twice <= run.concurrency
        assert spent_in_vain(run, fleet) <= count * 2 * sum(rates.values()) + 2 * run.concurrency


def test_fifty_kills(tmp_path: Path) -> None:
    """SIGKILL at fifty seeded moments: at the start, while answers stream in, and while the shard is being finished."""
    with servers(tmp_path, 2, Answers(3), dialect="sglang", tokens_per_second=400) as fleet:
        run = Run(tmp_path, prompts(1_500), [s.url for s in fleet], kind="sglang", concurrency=32, answers=Answers(3))
        kill_and_resume(run, fleet, during=44, finishing=6, seed=1)


def test_full_disk(tmp_path: Path) -> None:
    """Somebody else fills a small file system while answers arrive: one clear line, and nothing is lost or paid twice
    when there is room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], check=True)
    try:
        with servers(tmp_path, 1, Answers(4), dialect="sglang", tokens_per_second=300) as fleet:
            run = Run(disk, prompts(1_000), [s.url for s in fleet], kind="sglang", concurrency=64, answers=Answers(4))
            job = run.start()
            assert await_progress(job, lambda: len(run.journalled()) >= 100)
            fill(disk / "somebody's")
            assert job.wait(120) == 1, run.log()
            # The log of the job lies on the full disk too: what matters are its exit code and the journal.
            safe, whole = run.journalled(), answered_whole(run, fleet)
            assert 100 < len(safe) < 1_000
            lost = set(whole) - {run.digests[prompt_id] for prompt_id in safe}
            assert not lost, f"{len(lost)} answers that had arrived were lost"
            mark = fleet[0].count()
            (disk / "somebody's").unlink()
            assert run.finish() == 0, run.log()
            assert run.check().total() == 1_000
            again = {line["prompt"] for line in fleet[0].served()[mark:]} & {
                run.digests[prompt_id] for prompt_id in safe
            }
            assert not again
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(path: Path) -> None:
    """A file as large as the file system lets it be."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0" * 65536):
            pass
