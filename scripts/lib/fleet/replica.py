"""One contained server: nothing that it started outlives this process.

    python -m scripts.lib.fleet.replica [--grace SECONDS] -- COMMAND ...

Standard input is a pipe whose other end the keeper holds: its end of file means that the keeper is
gone (kill -9 included), and then the server is stopped. This process adopts the orphans of the
server, so it knows every descendant, even those that moved to a session of their own, such as
SGLang's schedulers. If this process itself is killed, the kernel kills the server, and the keeper
sweeps up the rest (`processes.sweep`).
"""

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import psutil

from scripts.lib.core.provenance import PROJECT
from scripts.lib.fleet import processes

GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def with_project(path: str | None) -> str:
    """PYTHONPATH that finds this module; `contain` takes it back, a server's imports must not meet ours."""
    return os.pathsep.join(filter(None, [str(PROJECT), path]))


def without_project(path: str) -> str:
    """PYTHONPATH as the server is to see it."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != str(PROJECT))


def descendants() -> list[psutil.Process]:
    """All living descendants of this process; ended ones are reaped."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _reap(server: subprocess.Popen) -> None:
    """Collect ended orphans. The server itself is left to Popen, which needs its exit status."""
    for process in psutil.Process().children():
        if process.pid != server.pid:
            with contextlib.suppress(ChildProcessError, psutil.Error):
                os.waitpid(process.pid, os.WNOHANG)


def end(server: subprocess.Popen, grace: float) -> None:
    """SIGTERM to the server's group, SIGKILL to whatever is left after `grace` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while True:
        server.poll()
        _reap(server)
        left = descendants()
        if not left:
            return
        if time.monotonic() >= deadline or server.poll() is not None:
            # The server is gone or had its time: its children have nobody to finish for.
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.05)


def contain(command: list[str], grace: float) -> int:
    """Run a command until it ends, standard input closes or SIGTERM comes. Returns its exit status."""
    processes.adopt_orphans()
    stop, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the select below
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": without_project(os.environ.get("PYTHONPATH", ""))},
        process_group=0,
        preexec_fn=processes.die_with_parent,
    )
    while server.poll() is None and not asked:
        readable, _, _ = select.select([0, stop], [], [])
        if stop in readable:
            os.read(stop, 4096)
        if 0 in readable and not os.read(0, 4096):
            break
        _reap(server)
    end(server, grace)
    code = server.wait()
    return 128 - code if code < 0 else code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.lib.fleet.replica", description=__doc__)
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs="+", help="the server, after `--`")
    arguments = parser.parse_args(argv)
    try:
        return contain(arguments.command, arguments.grace)
    except OSError as error:
        print(f"error: cannot start {arguments.command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


if __name__ == "__main__":
    sys.exit(main())
