"""File locks, between real processes."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.core.locks import Lock, hold, is_held

# Holds the lock file that it is told until its stdin ends, and says when it has it.
HOLDER = """
import sys
from pathlib import Path
from scripts.lib.core.locks import hold
lock = hold(Path(sys.argv[1]), what="it")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process that holds `lock`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_writes_is_named(tmp_path: Path, other) -> None:
    with pytest.raises(UserError, match=rf"^shard x/000 is being written by process {other.pid} on \S+: wait until"):
        hold(tmp_path / "lock", wait=0.0, what="shard x/000")
    assert is_held(tmp_path / "lock")


def test_a_killed_holder_makes_way_within_the_patience(tmp_path: Path, other) -> None:
    other.send_signal(signal.SIGKILL)
    with hold(tmp_path / "lock", wait=60.0, what="it") as lock:
        assert lock.holder.startswith(f"process {os.getpid()} on ")


def test_readers_share_and_keep_a_writer_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold(path, shared=True) as first, hold(path, shared=True), Lock(path) as writer:
        assert not writer.take()
        assert not is_held(path)  # by nobody alone
        first.close()
        assert not writer.take()
    with Lock(path) as writer:
        assert writer.take()
        writer.release()
        hold(path, wait=0.0).close()


def test_programs_started_meanwhile_do_not_keep_it(tmp_path: Path) -> None:
    lock = hold(tmp_path / "lock")
    descriptor = os.dup(lock.descriptor)
    os.set_inheritable(descriptor, True)  # as that of a keeper's lock is when it starts
    inherited = Lock(tmp_path / "lock", descriptor)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.close()
        inherited.close()
        hold(tmp_path / "lock", wait=0.0).close()
        child.stdin.close()


def test_a_lock_that_is_not_there_is_nobody_s(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        is_held(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=rf"lock: the file system has no locks \({os.strerror(number)}\): mount it"):
        hold(tmp_path / "lock")
