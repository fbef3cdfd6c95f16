"""What the table of a run says beside its figures."""

import io

import pytest
from rich.console import Console

from scripts.lib.completions.progress import Figures, RunProgress
from scripts.watch_progress import table


def shown(**values):
    out = io.StringIO()
    datasets = {"chat": Figures(), "\x1b[2J": Figures()}
    Console(file=out, width=120).print(table(RunProgress(updated=0.0, datasets=datasets, **values)))
    return out.getvalue()


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"s3_uploaded": 5, "s3_bytes": 1_200_000_000}, "uploaded: 5 files, 1.2GB\n"),
        ({"s3_failed": 7}, "uploaded: 0 files, 0B, 7 failed: see results/state/upload.log\n"),
    ],
)
def test_uploads_are_told(counts, says):
    assert says in "".join(line.rstrip() + "\n" for line in shown(**counts).splitlines())


def test_nothing_is_said_of_uploads_where_there_are_none():
    assert "uploaded" not in shown()


def test_names_steer_no_terminal():
    assert "\x1b" not in shown()
