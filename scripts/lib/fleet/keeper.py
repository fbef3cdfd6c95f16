"""The process that starts the servers, watches them, and ends them when nobody uses them any more.

    python -m scripts.lib.fleet.keeper --folder FOLDER --lock-descriptor N

It is started by the first lease, which hands it the lock that makes it the only keeper of its
folder. It lives in a session of its own and has nothing of its starter: no terminal, no pipes, no
lease.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp

from scripts.lib.core.command import say
from scripts.lib.core.locks import Lock
from scripts.lib.engines.base import Call
from scripts.lib.engines.launching import ServerPlan
from scripts.lib.engines.metrics import MetricNames
from scripts.lib.fleet import health, processes
from scripts.lib.fleet.folder import FleetFolder
from scripts.lib.fleet.ports import Ports
from scripts.lib.fleet.server import Patience, ServerProcess

_LOOK = 0.25  # seconds between looks at the leases
_PUBLISH = 1.0  # seconds between writes of the fleet file when nothing but the load changes


class Keeper:
    """Runs the servers of `launch.json` and publishes what they are doing in `fleet.json`."""

    def __init__(self, folder: FleetFolder, lock: Lock) -> None:
        launch = folder.read(folder.launch)
        self.folder, self.lock = folder, lock
        self.signature = launch["signature"]
        self.linger = health.Linger(launch["linger"])
        logs = Path(launch["logs"])
        one_token = with_key(Call(**launch["one_token"]), launch["api_key_env"], launch["plans"][0]["command"])
        metrics = MetricNames(**launch["metrics"])
        ports = Ports(folder.ports)
        self.one_is_ready = asyncio.Event()
        self.first_alone = Path(launch["first_alone"]) if launch["first_alone"] else None
        self.servers = [
            ServerProcess(
                index,
                ServerPlan(**plan),
                one_token,
                metrics,
                folder.directory,
                logs / f"server-{index}.log",
                Patience(**launch["patience"]),
                ports,
                self.one_is_ready,
                launch["incarnation"],
                port,
            )
            for index, (plan, port) in enumerate(zip(launch["plans"], launch["ports"]))
        ]
        self.published: dict = {}
        self.published_at = 0.0
        self.unpublished = False  # since the last time that it could be written

    def publish(self) -> None:
        """Write the fleet file when something changed; when it is only the load, once a second."""
        servers = [server.describe() for server in self.servers]
        now = time.monotonic()
        state = {"keeper": os.getpid(), "signature": self.signature, "servers": servers}
        without_load = {**state, "servers": [{**server, "metrics": None} for server in servers]}
        if without_load == self.published and now - self.published_at < _PUBLISH:
            return
        # Cleaners of /tmp go by age.
        for path in (self.folder.keeper_lock, self.folder.leases_lock, self.folder.launch):
            with contextlib.suppress(OSError):
                os.utime(path)
        try:
            self.folder.write(self.folder.fleet, state)
        except OSError as error:  # the servers go on: they are well, and the next look tries again
            if not self.unpublished:
                say(
                    f"warning: {error}: jobs learn nothing new about the servers until it can be written; the servers go on"
                )
            self.unpublished = True
            return
        self.published, self.published_at, self.unpublished = without_load, now, False

    async def run(self) -> None:
        """Until no lease has been held for the linger, or SIGTERM."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        left = await asyncio.to_thread(processes.sweep, str(self.folder.directory))
        if left:
            say(f"killed what an earlier keeper left: processes {', '.join(map(str, left))}")
        # trust_env off: a proxy of the environment has no business between us and the loopback interface.
        async with aiohttp.ClientSession(trust_env=False) as session:
            tasks = [
                asyncio.create_task(self._supervise(server, session, wait=self.first_alone is not None and index > 0))
                for index, server in enumerate(self.servers)
            ]
            with Lock(self.folder.leases_lock) as leases:
                while not asked.is_set():
                    for task in tasks:
                        if task.done() and (problem := task.exception()):
                            raise problem
                    self.publish()
                    if self._unused(leases):
                        break
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asked.wait(), _LOOK)
                # Whoever comes now waits for the exclusive lock, that is until the servers are gone and
                # their GPUs free, and starts the next keeper.
                say("stopping: " + ("told to" if asked.is_set() else "nobody uses the servers"))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.publish()

    async def _supervise(self, server: ServerProcess, session: aiohttp.ClientSession, *, wait: bool) -> None:
        """Run a server, if it is to `wait` when the first one is ready or given up.

        Starts that compile kernels would all compile the same ones, in the memory of one machine, into the same caches.
        """
        while wait and not self.one_is_ready.is_set() and self.servers[0].status not in ("failed", "stopped"):
            await asyncio.sleep(_LOOK)
        if self.first_alone and self.one_is_ready.is_set():
            with contextlib.suppress(OSError):  # the next fleet then starts one by one as well
                self.first_alone.touch()
        await server.supervise(session)

    def _unused(self, leases: Lock) -> bool:
        """Whether to end now. If so the leases' lock stays held."""
        if not leases.in_place() or not self.lock.in_place():
            return True  # somebody removed the folder: nobody can find this keeper any more
        free = leases.take()
        over = self.linger.over(time.monotonic(), leased=not free, stop_asked=self.folder.stop.exists())
        if free and not over:
            leases.release()
        return over


def with_key(call: Call, api_key_env: str | None, command: list[str]) -> Call:
    """A call with the server's API key: that of the environment, or else the one that its command names."""
    key = os.environ.get(api_key_env or "", "").strip()
    if not key and "--api-key" in command[:-1]:
        key = command[command.index("--api-key") + 1]
    return dataclasses.replace(call, headers={**call.headers, "Authorization": f"Bearer {key}"}) if key else call


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.lib.fleet.keeper", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder where jobs and keeper meet")
    parser.add_argument("--lock-descriptor", type=int, required=True, help="open descriptor of the locked keeper.lock")
    arguments = parser.parse_args(argv)
    folder = FleetFolder(arguments.folder)
    folder.remove(folder.stop)
    try:
        # Servers don't inherit it: the lock would outlive this process.
        asyncio.run(Keeper(folder, Lock(folder.keeper_lock, arguments.lock_descriptor)).run())
    finally:
        processes.sweep(str(folder.directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
