"""The whole workflow through a real Slurm: every generation job with servers of its own in its allocation."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import orjson
import psutil
import pytest

from scripts.lib.completions.journal import scan
from scripts.lib.completions.journal_records import Done
from scripts.lib.core import records
from scripts.lib.core.records import Completion, Prompt
from scripts.lib.target.model import load_target
from tests.fault_server.answers import Answers, digest
from tests.generation import servers
from tests.slurm.conftest import Slurm
from tests.workflow.project import Project, wait_for

pytestmark = pytest.mark.slurm

CONFIG = {
    "model": {"name": "embedded:smollm2", "context_length": 512},
    # The engine is a CPU build: it gets a GPU from Slurm and lets it be.
    "engine": {"kind": "llamacpp", "launch": {"slots": 4, "threads": 1, "linger": 1, "gpus_per_replica": 1}},
    "lanes": {"short": {"max_tokens": 16, "concurrency": 4}},
    "shards": 2,
    "datasets": {
        "code": {"class": "B", "source": "config/prompts/code.jsonl", "max_samples": 8},
        "conversations": {"class": "A", "source": "config/prompts/conversations.jsonl", "max_samples": 4},
    },
}
IN_FLIGHT = 4  # of both jobs together
# What a site changes in profiles/slurm: sizes, and no accounting here.
SITE = [
    "--default-resources", "mem_mb=500", "runtime=20",
    "--set-resources", "generate_completions:mem_mb=1500", "generate_completions:gpu=1",
    "generate_completions:cpus_per_task=1", "generate_completions:runtime=20",
    "--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1",
    "--seconds-between-status-checks", "2", "--latency-wait", "10",
]  # fmt: skip


class Submission(Project):
    """A project that submits its jobs with profiles/slurm."""

    patience = 1200  # Slurm and its executor look at jobs only every few seconds

    plugin: Path

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(self.plugin)}

    def command(self, *arguments: str, cores: int = 4) -> list[str]:
        run = [
            sys.executable,
            "-m",
            "snakemake",
            *arguments,
            "--profile",
            "profiles/slurm",
            "--configfile",
            "test.yaml",
        ]
        return [*run, *SITE]

    def outcomes(self) -> dict[str, str]:
        """Outcome by id of the class-B prompts; checks that none is missing or twice."""
        asked, answered = [], []
        for path in sorted(self.result("prompts/code").glob("0*.parquet")):
            asked += [prompt.id for prompt in records.read_rows(path, Prompt)]
        for path in sorted(self.result("completions/code").glob("*.parquet")):
            answered += [(row.id, row.outcome) for row in records.read_rows(path, Completion)]
        assert sorted(asked) == sorted(name for name, _ in answered)
        return dict(answered)

    def server_logs(self) -> dict[str, str]:
        """First line of each server log by the allocation that it ran in."""
        logs = self.result("state/servers").glob("*/server-0.log")
        return {path.parent.name: path.read_text().splitlines()[0] for path in logs}


@pytest.fixture
def project(slurm: Slurm, tmp_path: Path) -> Submission:
    project = Submission(tmp_path / "project", CONFIG)
    project.plugin = slurm.plugin
    return project


def fleet_left(project: Submission) -> list[psutil.Process]:
    return [
        p for p in project.processes() if "scripts.lib.fleet" in " ".join(p.cmdline()) or "embedded_server" in str(p)
    ]


def test_corpus_through_slurm(project: Submission, slurm: Slurm) -> None:
    assert "merge_training" in project.snakemake("-n", "merge_training").stdout
    project.snakemake("merge_training")
    assert set(project.outcomes().values()) <= {"ok", "length"}
    manifest = orjson.loads((project.result("training") / "manifest.json").read_bytes())
    assert manifest
    logs = project.server_logs()
    assert len(logs) == 2  # one allocation for each generation job
    for label, first in logs.items():
        assert re.fullmatch(r".+-\d+-0", label)
        assert re.search(r" CUDA_VISIBLE_DEVICES=[01] ", first)
    assert all(state == "COMPLETED" for _, state, _ in slurm.jobs())
    wait_for(lambda: not fleet_left(project), 30, "the servers to end with their allocations")
    assert "Nothing to be done" in project.snakemake("merge_training").stdout


def test_job_that_slurm_ends_is_submitted_again_and_goes_on(project: Submission, slurm: Slurm) -> None:
    before = {job for job, _, _ in slurm.jobs()}

    def generating() -> list[str]:
        return [job for job, state, comment in slurm.jobs()
                if job not in before and state == "RUNNING" and "generate_completions" in comment]  # fmt: skip

    shards = [f"results/completions/code/00{shard}.parquet" for shard in range(2)]
    running = project.start(*shards)
    try:
        journals = project.result("state/journals/code")
        wait_for(lambda: any(path.read_bytes().count(b"\n") > 2 for path in journals.glob("*.journal")), 600, "answers")
        killed = generating()
        assert killed
        # As on a node that dies: every process of the job at once, without a warning.
        slurm.run("scancel", "--signal=KILL", "--full", killed[0])
        assert running.wait(project.patience) == 0, (project.folder / "killed.log").read_text()
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
            running.wait(60)
    assert set(project.outcomes().values()) <= {"ok", "length"}
    assert any(f"-{killed[0]}-" in label for label in project.server_logs())
    assert {job: state for job, state, _ in slurm.jobs()}[killed[0]] != "COMPLETED"
    wait_for(lambda: not fleet_left(project), 30, "the servers to end with their allocations")


def test_node_that_dies_and_comes_back(project: Submission, slurm: Slurm, tmp_path: Path) -> None:
    """All jobs die with their node; Slurm requeues them, and nothing that was answered is asked again."""
    with servers(tmp_path, 1, Answers(31), dialect="llamacpp", tokens_per_second=20) as [server]:
        engine = {"kind": "llamacpp", "endpoints": [server.url]}
        lanes = {"short": {"max_tokens": 64, "concurrency": IN_FLIGHT}}
        code = {"class": "B", "source": "config/prompts/code.jsonl"}
        project.configure({**CONFIG, "engine": engine, "lanes": lanes, "datasets": {"code": code}})
        before = {job for job, _, _ in slurm.jobs()}
        running = project.start(*(f"results/completions/code/00{shard}.parquet" for shard in range(2)))
        try:
            wait_for(lambda: all(len(answered(project, shard)) > 2 for shard in range(2)), 600, "answers of both jobs")
            died = [job for job, state, _ in slurm.jobs() if state == "RUNNING"]
            slurm.kill_node()
            kept = answered(project, 0) | answered(project, 1)
            wait_for(lambda: {state for job, state, _ in slurm.jobs() if job in died} == {"PENDING"}, 60, "the requeue")
            slurm.boot_node()
            # Slurm holds them back for two minutes, so that late orders to kill the dead jobs don't meet the new ones.
            assert running.wait(project.patience) == 0, (project.folder / "killed.log").read_text()
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)
                running.wait(60)
        asked = Counter(line["prompt"] for line in server.served())
    # The same two jobs went on, Snakemake submitted nothing anew.
    assert len(died) == 2
    assert {job: state for job, state, _ in slurm.jobs() if job in died} == dict.fromkeys(died, "COMPLETED")
    assert len({job for job, _, _ in slurm.jobs()} - before) == 3  # with the one that prepared the prompts
    assert set(project.outcomes()) >= kept
    again, whole = set(), load_target(project.result("target"))
    for path in project.result("prompts/code").glob("0*.parquet"):
        for prompt in records.read_rows(path, Prompt):
            first = next(n for n, message in enumerate(prompt.messages) if message.role == "user")
            times = asked[digest(whole.render(prompt.messages[: first + 1]))]
            assert times >= 1
            if times > 1:
                again.add(prompt.id)
    assert not again & kept
    assert len(again) <= IN_FLIGHT


def answered(project: Submission, shard: int) -> set[str]:
    """Prompts of a shard whose answer is safe."""
    path = project.result(f"state/journals/code/00{shard}.journal")
    return {line.record.prompt_id for line in scan(path) if isinstance(line.record, Done)} if path.exists() else set()


def test_failed_start_leads_to_the_servers_log(project: Submission, slurm: Slurm) -> None:
    launch = {**CONFIG["engine"]["launch"], "gpus_per_replica": 2}
    project.configure({**CONFIG, "engine": {**CONFIG["engine"], "launch": launch}})
    done = project.snakemake("--retries", "0", "results/completions/code/000.parquet", check=False)
    assert done.returncode != 0
    assert "1 replicas of 2 GPUs need 2, CUDA_VISIBLE_DEVICES names 1" in done.stdout


def test_cluster_is_not_left_with_jobs(slurm: Slurm) -> None:
    subprocess.run(["squeue", "--noheader"], check=True)
    assert not [job for job, state, _ in slurm.jobs() if state in ("RUNNING", "PENDING")]
