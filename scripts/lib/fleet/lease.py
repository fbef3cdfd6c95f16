"""A job's hold on the servers: while it lives, they live; when it is gone, however it went, they may go.

A lease is an flock on a shared file, so the kernel gives it back when the process ends, on kill -9
too. All calls are short except the first `endpoints()`, which waits for a model to load: inside an
event loop call that one in a thread.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core.command import say
from scripts.lib.core.errors import UserError
from scripts.lib.core.locks import Lock, hold
from scripts.lib.core.paths import State
from scripts.lib.engines import adapter_for
from scripts.lib.engines.metrics import EngineMetrics
from scripts.lib.engines.weights import fetch_weights
from scripts.lib.fleet import launch, tickets
from scripts.lib.fleet.folder import FleetFolder, PublishedServer, machine_label
from scripts.lib.fleet.replica import with_project
from scripts.lib.fleet.server import last_lines
from scripts.lib.fleet.tickets import Ticket

_POLL = 0.1
_CHANGE_SECONDS = 120  # for servers of another configuration to end
_KEEPER_STARTS = 5  # keepers that one lease starts before it gives up: each loads the model anew


@dataclass(frozen=True)
class Endpoint:
    """A server that answers. `incarnation` changes when another server has taken its place."""

    url: str
    incarnation: int


@contextlib.contextmanager
def lease(config: Config, target_dir: Path, state: Path, lane: str) -> "Iterator[Lease]":
    """Hold the servers of the run whose state folder is `state`, as one of the jobs of `lane`.

    Returns at once; `Lease.endpoints` waits for the servers. With `engine.endpoints` set nothing is
    started, only counted. Raises UserError when the configuration can't be launched.
    """
    held = Lease(config, Path(target_dir), Path(state), lane)
    try:
        held.join()
        yield held
    finally:
        held.close()


class Lease:
    """Made by `lease`."""

    def __init__(self, config: Config, target_dir: Path, state: Path, lane: str) -> None:
        self.config, self.target_dir, self.state, self.lane = config, target_dir, state, lane
        self.external = [url.rstrip("/") for url in config.engine.endpoints]
        self.signature = launch.signature(config, target_dir)
        self.logs = State(state.resolve()).servers / machine_label()
        self.folder = FleetFolder.of(state)
        self._lock: Lock | None = None  # leases.lock, shared
        self._ticket: Ticket | None = None  # counts this lease in its lane
        self._keeper: subprocess.Popen | None = None
        self._starts = 0
        self._warned: set[object] = set()

    def join(self) -> None:
        """Take the lease; start a keeper when there is none. Again when the folder was emptied."""
        if not self.external:
            if adapter_for(self.config).environment:
                fetch_weights(self.config, self.folder.downloads)
            end = time.monotonic() + _CHANGE_SECONDS
            while not self._join_fleet():
                if time.monotonic() > end:
                    raise UserError(
                        f"{self.state}: other jobs are still using servers of another configuration: let them finish "
                        "(or stop them), or give this run its own results folder"
                    )
                time.sleep(_POLL)
        self._ticket = Ticket(self._lane_folder())

    def close(self) -> None:
        """Give the lease back. Safe to call again."""
        if self._ticket:
            self._ticket.give_back()
        if self._lock is not None:
            self._lock.close()
        self._ticket = self._lock = None

    def endpoints(self, timeout: float | None = None) -> list[Endpoint]:
        """Servers that are ready now. Waits for the first, at most `timeout` seconds; then [].

        Starts the next keeper when the last one is gone. Raises UserError with the server's last log
        lines when no server can be started.
        """
        if self.external:
            return [Endpoint(url, 0) for url in self.external]
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            servers = self._servers()
            ready = [Endpoint(server.url, server.incarnation) for server in servers if server.status == "ready"]
            failed = [server for server in servers if server.status == "failed"]
            for server in failed:
                # Which the keeper starts again every few minutes while others work.
                how = "given up for now, tried again every few minutes," if ready else "given up"
                self._warn(server.index, f"{how} after {server.restarts} restarts: {server.error}")
            if ready:
                return ready
            if servers and len(failed) == len(servers):
                raise UserError(f"no server could be kept up: {failed[0].error}")
            if end is not None and time.monotonic() >= end:
                return []
            time.sleep(_POLL)

    def share(self, ceiling: int) -> int:
        """This lease's part of a lane's `ceiling`, at least 1; the parts of all live leases add up to it."""
        assert self._ticket is not None  # since `join`
        mine = self._ticket.path.name
        # A lease whose folder somebody emptied is not found there, yet it counts.
        names = sorted({*tickets.live(self._ticket.path.parent), mine})
        whole, rest = divmod(ceiling, len(names))
        return max(1, whole + (names.index(mine) < rest))

    def metrics(self) -> dict[str, EngineMetrics]:
        """Load of each ready server by its URL, at most some seconds old. {} for external endpoints."""
        if self.external:
            return {}
        fleet = self.folder.published()
        return {server.url: server.metrics for server in fleet.servers if server.metrics} if fleet else {}

    def _lane_folder(self) -> Path:
        """Where the tickets of this lane's leases lie.

        Leases on external endpoints may be held on many machines, so they meet in the state folder.
        """
        lanes = State(self.state).leases if self.external else self.folder.lanes
        return lanes / urllib.parse.quote(self.lane, safe="")

    def _servers(self) -> list[PublishedServer]:
        """What the keeper says of its servers, [] while it hasn't said anything. Starts a keeper when there is none."""
        if self._lock is None or not self._lock.in_place():
            self.close()
            self.folder = FleetFolder.of(self.state)
            self.join()
        if not self.folder.keeper_lives():
            self._check_keeper()
            self._start_keeper()
            return []
        fleet = self.folder.published()
        if fleet is None and self.folder.is_full():
            self._warn(
                "full",
                f"{self.folder.directory}: the disk is full: no server can be announced until some space is free",
            )
        return fleet.servers if fleet and fleet.signature == self.signature else []

    def _warn(self, about: object, text: str) -> None:
        """Say it once."""
        if about not in self._warned:
            self._warned.add(about)
            say(f"warning: {text}")

    def _join_fleet(self) -> bool:
        """Take the shared lock and see that a keeper of our configuration lives or starts. False: try again."""
        # Waits only while a keeper is stopping its servers.
        self._lock = hold(self.folder.leases_lock, shared=True)
        if not self.folder.keeper_lives():
            self._start_keeper()
        running = self.folder.read(self.folder.launch).get("signature")
        if running in (None, self.signature):
            return True
        # Servers of another configuration: ask their keeper to end as soon as nobody uses them.
        self.folder.stop.touch()
        self._lock.close()
        self._lock = None
        return False

    def _start_keeper(self) -> None:
        """Start a keeper unless somebody else is faster. It inherits the lock that makes it the only one."""
        with Lock(self.folder.keeper_lock) as lock:
            if not lock.take():
                return
            self._starts += 1
            settings = self.config.engine.launch
            adapter = adapter_for(self.config)
            one_token, plans = adapter.one_token(), launch.plan(self.config, self.target_dir)
            warm = self.folder.warm(plans[0])
            cold = adapter.compiles and len(plans) > 1 and not warm.exists()
            if self.config.model.trust_remote_code:
                for index, plan in enumerate(plans):
                    # Copied there by each server while others import it (TensorRT-LLM issue 17708, on Kimi-K2.5).
                    plan.env.setdefault("HF_MODULES_CACHE", str(self.folder.directory / f"modules-{index}"))
            self.logs.mkdir(parents=True, exist_ok=True)
            # A number that no server of this folder had before, so that clients see the change.
            last = self.folder.published()
            servers = last.servers if last else []
            incarnation = max((server.incarnation for server in servers), default=0)
            ports = {server.index: server.port for server in servers}
            self.folder.remove(self.folder.fleet)
            self.folder.write(
                self.folder.launch,
                {
                    "signature": self.signature,
                    "one_token": {**dataclasses.asdict(one_token), "body": (one_token.body or b"").decode()},
                    "metrics": adapter.metrics and dataclasses.asdict(adapter.metrics),
                    "plans": [{"command": plan.command, "env": plan.env} for plan in plans],
                    "api_key_env": self.config.engine.api_key_env,
                    "first_alone": str(warm) if cold else None,
                    "incarnation": incarnation,
                    "ports": [ports.get(index, 0) for index in range(len(plans))],
                    "linger": settings.linger,
                    "logs": str(self.logs),
                    "patience": {
                        "start_timeout": settings.start_timeout,
                        "hang_seconds": settings.hang_seconds,
                        "crash_budget": settings.crash_budget,
                    },
                },
            )
            arguments = ["--folder", str(self.folder.directory), "--lock-descriptor", str(lock.descriptor)]
            with open(self.logs / "keeper.log", "ab") as log:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-m", "scripts.lib.fleet.keeper", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=os.environ
                    | {"PYTHONPATH": with_project(os.environ.get("PYTHONPATH")), "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                    pass_fds=[lock.descriptor],
                )

    def _check_keeper(self) -> None:
        """Raise UserError when keepers that this lease started don't stay up."""
        if self._keeper is None or self._keeper.poll() is None:
            return
        published = self.folder.published()
        died_early = published is None or published.keeper != self._keeper.pid
        if died_early or self._starts >= _KEEPER_STARTS:
            log = self.logs / "keeper.log"
            lines = "".join(f"\n  {line}" for line in last_lines(log))
            raise UserError(
                f"the keeper of the servers ended with exit code {self._keeper.returncode}; last lines of {log}:{lines}"
            )
