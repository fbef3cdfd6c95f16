"""Memory is flat in the size of a source: measured in a process of its own, on files of gigabytes."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from scripts import prepare_target
from scripts.lib.core.provenance import PROJECT

MEGABYTES = 400
ANSWER = "The same long answer, as it is not what counts here, only its length. " * 120

# The peak of the process itself (VmHWM), told after the stage's own output.
COMMAND = """
import sys
from scripts.prepare_prompts import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def row(number):
    question = (
        f"Question {number}: why is {number * 7919 % 10007} not {number * 104729 % 99991}? Say it in a few words."
    )
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]}


def write_lines(path, size):
    with open(path, "w") as file:
        for number in range(size // (len(ANSWER) + 200)):
            file.write(json.dumps(row(number)) + "\n")


def write_array(path, size):
    with open(path, "w") as file:
        for number in range(size // (len(ANSWER) + 200)):
            file.write(("," if number else "[") + json.dumps(row(number), indent=1))
        file.write("]")


def write_parquet(path, size):
    """One row group of all rows, as careless writers make them."""
    rows = [row(number) for number in range(size // (len(ANSWER) + 200))]
    for number, one in enumerate(rows):
        one["messages"][1]["content"] = f"{number} {ANSWER}"  # no dictionary can shrink it
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=len(rows), compression=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "write", "size"),
    [
        ("two-gigabytes.jsonl", write_lines, 2_000_000_000),
        ("array.json", write_array, 700_000_000),
        ("row-group.parquet", write_parquet, 700_000_000),
    ],
)
def test_large_source_in_little_memory(tmp_path, name, write, size):
    write(tmp_path / name, size)
    assert (tmp_path / name).stat().st_size >= 0.95 * size
    config = {
        "datasets": {"a": {"class": "B", "source": str(tmp_path / name), "max_samples": 2000}},
        "lanes": {"short": {"max_tokens": 100, "concurrency": 1}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert prepare_target.main(["--config", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "target")]) == 0
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--config", str(tmp_path / "config.yaml"), "--dataset", "a",
         "--target", str(tmp_path / "target"), "--output", str(tmp_path / "out")],
        cwd=PROJECT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert report["rows"] == size // (len(ANSWER) + 200)
    assert report["kept"] == 2000
    assert int(done.stdout.split()[-1]) / 1024 < MEGABYTES
    (tmp_path / name).unlink()  # pytest keeps the folders of the last runs
