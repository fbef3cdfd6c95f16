"""The corpus survives whatever hits a merge, a backup or a restore: at each file-system call in turn.

A forked child arms an audit hook, which Python calls before every file-system call, and dies by
SIGKILL, or gets an error from the kernel, at the n-th one. What Python doesn't announce (fsync, and
the files that Arrow opens and writes) is announced by thin wrappers.
"""

import errno
import itertools
import os
import random
import signal
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.training import versions
from scripts.lib.training.backup import all_backups, back_up, restore
from scripts.lib.training.manifest import require_whole
from tests.corpora import bytes_of, config, corpus, shards

CALLS = {
    "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.fsync",
    "arrow.open", "arrow.write", "arrow.close",
}  # fmt: skip
# Exit statuses of the child besides that of a kill.
SHRUGGED, FAILED_AS_TOLD, FAILED_OTHERWISE, NOT_STRUCK = 10, 11, 12, 13


def announce(owner, name, event, child):
    """Let calls of a function raise an audit event first, naming a path under the results."""
    real = getattr(owner, name)

    def announced(*arguments, **options):
        sys.audit(event, str(child))
        return real(*arguments, **options)

    setattr(owner, name, announced)


def strike(work, results: Path, at: int, kind: str) -> int:
    """Run `work` in a child and strike at its `at`-th file-system call under `results`. Returns the exit status.

    Status: NOT_STRUCK when there were fewer calls, -9 when killed, SHRUGGED when the error did no harm
    (as for the mkdir of a folder that is there), FAILED_AS_TOLD for one line to the user or the
    kernel's own error, FAILED_OTHERWISE for anything else.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = FAILED_OTHERWISE
    try:
        for owner, name, event in (
            (os, "fsync", "os.fsync"),
            (pa, "OSFile", "arrow.open"),
            (pq.ParquetWriter, "write_table", "arrow.write"),
            (pq.ParquetWriter, "close", "arrow.close"),
        ):
            announce(owner, name, event, results / "file")
        count = itertools.count(1)

        def hook(event, arguments):
            # Reading what others made is no danger: only paths under the results count.
            if event in CALLS and any(str(one).startswith(str(results)) for one in arguments) and next(count) == at:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

        sys.addaudithook(hook)
        work()
        status = SHRUGGED if next(count) > at else NOT_STRUCK
    except (UserError, OSError):
        status = FAILED_AS_TOLD
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def strikes(work, results, reset, check, kind):
    """Strike at the first, second, ... call, from a fresh start each time, until the work gets through."""
    at, status = 0, None
    while status != NOT_STRUCK:
        at += 1
        reset()
        status = strike(work, results, at, kind)
        check(at)
        expected = (-signal.SIGKILL,) if kind == "kill" else (FAILED_AS_TOLD, SHRUGGED)
        assert status in (*expected, NOT_STRUCK), f"call {at}: status {status}"
    return at


class Place:
    """A results folder with an old corpus, and the bytes of the old and the new one."""

    def __init__(self, folder: Path):
        self.results = folder / "results"
        self.training = self.results / "training"
        self.backups = self.results / "backups"
        self.paths = shards(folder / "validated", rows=6)
        self.old = corpus(self.results, config(seed=0, rows_per_part=13), self.paths).version
        self.old_bytes = bytes_of(self.training)
        self.old_directory = versions.current(self.training)
        self.merge()
        self.new = versions.current(self.training).name
        self.new_bytes = bytes_of(self.training)

    def merge(self):
        corpus(self.results, config(seed=1, rows_per_part=13), self.paths)

    def back_up(self):
        back_up(self.training, self.backups, 1, lambda line: None, lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def to_old(self):
        versions.swap(self.training, self.old_directory)
        new = versions.corpora(self.training) / self.new
        if new.is_dir():
            versions.remove(new)

    def is_whole(self, *choices):
        assert bytes_of(self.training) in choices
        for version in versions.all_versions(self.training):
            require_whole(version)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("kind", ["kill", "ENOSPC", "EIO"])
def test_merge_struck_at_every_call(place, kind):
    def check(at):
        place.is_whole(place.old_bytes, place.new_bytes)
        place.merge()  # the next run finishes
        assert bytes_of(place.training) == place.new_bytes
        assert list(versions.corpora(place.training).glob(f".*{versions.STAGING_SUFFIX}")) == []

    assert strikes(place.merge, place.results, place.to_old, check, kind) > 30


@pytest.mark.parametrize("kind", ["kill", "EIO"])
def test_backup_struck_at_every_call(place, kind):
    place.to_old()
    place.back_up()
    (first,) = all_backups(place.backups)
    place.merge()

    def reset():
        for one in all_backups(place.backups):
            if one.name != first.name:
                versions.remove(place.backups / one.name)
        if not all_backups(place.backups):
            place.to_old()
            place.back_up()
            place.merge()

    def check(at):
        place.is_whole(place.new_bytes)
        there = all_backups(place.backups)
        assert there
        for one in there:
            require_whole(place.backups / one.name)
        place.back_up()
        (only,) = all_backups(place.backups)
        assert only.version == place.new
        # The old version is gone from corpora: bring it back for the next round.
        versions.remove(place.backups / only.name)
        corpus(place.results, config(seed=0, rows_per_part=13), place.paths)

    assert strikes(place.back_up, place.results, reset, check, kind) > 10


@pytest.mark.parametrize("kind", ["kill", "EIO"])
def test_restore_struck_at_every_call(place, kind):
    place.to_old()
    place.back_up()
    (backup,) = all_backups(place.backups)

    def reset():
        place.merge()
        if place.old_directory.is_dir():
            versions.remove(place.old_directory)

    def check(at):
        place.is_whole(place.old_bytes, place.new_bytes)
        work()
        assert bytes_of(place.training) == place.old_bytes

    def work():
        restore(place.training, place.backups, backup.name, lambda line: None)

    assert strikes(work, place.results, reset, check, kind) > 10


@pytest.mark.chaos
def test_merge_killed_at_100_random_moments(tmp_path):
    """Not only between calls: also in the middle of Arrow's writes."""
    paths = shards(tmp_path / "validated", rows=400)
    results, training = tmp_path / "results", tmp_path / "results/training"
    old = corpus(results, config(seed=0), paths)
    old_bytes = bytes_of(training)
    started = time.monotonic()
    new = corpus(results, config(seed=1), paths)
    seconds = time.monotonic() - started
    new_bytes = bytes_of(training)
    moments = random.Random(0)
    killed = 0
    for _ in range(100):
        versions.swap(training, results / "corpora" / old.version)
        if (results / "corpora" / new.version).is_dir():
            versions.remove(results / "corpora" / new.version)
        child = os.fork()
        if child == 0:
            corpus(results, config(seed=1), paths)
            os._exit(0)
        time.sleep(moments.uniform(0, seconds * 1.1))
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert bytes_of(training) in (old_bytes, new_bytes)
        corpus(results, config(seed=1), paths)
        assert bytes_of(training) == new_bytes
    assert killed > 50
