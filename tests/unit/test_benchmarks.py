"""The benches use the stages' own code: they must still run when it changes. What they measure is no test."""

import subprocess
import sys

from scripts.lib.core.provenance import PROJECT


def test_fleet_bench_answers_every_prompt_in_virtual_time():
    command = [
        sys.executable,
        "-m",
        "benchmarks.fleet",
        "--prompts",
        "300",
        "--jobs",
        "1",
        "2",
        "--scenario",
        "one dies",
    ]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| one dies |") == 2


def test_client_bench_runs_every_contender():
    command = [sys.executable, "-m", "benchmarks.client", "--count", "40", "--rounds", "1", "--in-flight", "8"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"raw", "raw script", "ours"} <= {
        line.split("|")[2].strip() for line in done.stdout.splitlines() if "|" in line
    }
