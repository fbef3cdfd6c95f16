"""One server of the fleet over time: started, found ready, watched, started again when it crashes or hangs."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import aiohttp

from scripts.lib.core.command import say
from scripts.lib.core.errors import explain
from scripts.lib.engines.base import Call, Reply
from scripts.lib.engines.errors import error_details
from scripts.lib.engines.launching import OTHER_PORT, PORT, ServerPlan
from scripts.lib.engines.metrics import EngineMetrics, MetricNames, read_metrics
from scripts.lib.fleet import health, processes, replica
from scripts.lib.fleet.ports import Ports

_POLL = 0.25  # seconds between looks at a server's process
_WATCH = 1.0  # seconds between readings of a running server
_STARTS_ON_PORT = 2
_METRICS_SECONDS = 10.0
_AGAIN_SECONDS = 300.0  # between tries of a server that was given up while others work
_NO_PROXY = ("NO_PROXY", "no_proxy")
# Answers to the first request that no patience changes: a key, a path or a request that it doesn't know.
_REFUSALS = (400, 401, 403, 404, 405, 422)
_TOKEN_SECONDS = 60.0  # for one token from a server that looks hung
_LOG_BYTES = 64 << 20  # a log that is longer is set aside before a start
_TAIL_LINES = 15


@dataclass
class Patience:
    """How long and how often: the settings of engine.launch that servers don't depend on."""

    start_timeout: float
    hang_seconds: float
    crash_budget: int


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep a server's requests to itself off any proxy (SGLang asks itself at its start)."""
    named = [host for name in _NO_PROXY for host in environment.get(name, "").split(",") if host.strip()]
    hosts = ",".join(dict.fromkeys([*(host.strip() for host in named), "127.0.0.1", "localhost", "::1"]))
    return dict.fromkeys(_NO_PROXY, hosts)


def last_lines(path: Path, count: int = _TAIL_LINES) -> list[str]:
    """The last non-empty lines of a log, [] when it can't be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64_000))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()][-count:]
    return []


class ServerProcess:
    """Supervises one server. `status` is starting, ready, restarting, failed or stopped."""

    def __init__(
        self,
        index: int,
        plan: ServerPlan,
        one_token: Call,
        names: MetricNames,
        directory: Path,
        log: Path,
        patience: Patience,
        ports: Ports,
        one_is_ready: asyncio.Event,
        incarnation: int = 0,
        port: int = 0,
    ) -> None:
        """`incarnation` is that of the last server in this place, `port` the one that it was ready on, if it was.

        `one_is_ready` is shared by all servers of a fleet, which are alike: any of them has been ready.
        """
        self.index, self.plan, self.one_token, self.names = index, plan, one_token, names
        self.directory, self.log, self.patience = directory, log, patience
        self.ports, self.one_is_ready = ports, one_is_ready
        self.incarnation, self.port = incarnation, port
        self._taken: list[int] = []  # ports of the present process
        self._failed_starts = 0  # since it was ready last
        self.status = "starting"
        self.restarts = 0
        self.error: str | None = None  # why it was given up or last went down, with the log's last lines
        self.metrics: EngineMetrics | None = None
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def describe(self) -> dict:
        """What the fleet file says about this server."""
        return {
            "index": self.index,
            "url": self.url,
            "port": self.port,
            "incarnation": self.incarnation,
            "status": self.status,
            "restarts": self.restarts,
            "error": self.error,
            "log": str(self.log),
            "pid": self.process.pid if self.process else None,
            "metrics": dataclasses.asdict(self.metrics) if self.metrics and self.status == "ready" else None,
        }

    async def supervise(self, session: aiohttp.ClientSession) -> None:
        """Keep the server up until cancelled, or until its crash budget is used up and none like it works."""
        budget = health.CrashBudget(self.patience.crash_budget)
        ever_ready = False
        try:
            while True:
                began = time.monotonic()
                try:
                    process = self._start()
                except OSError as error:  # no memory, no more processes, a log that can't be opened
                    reason = f"could not be started: {explain(error)}"
                else:
                    reason = await self._until_ready(session, process) or ""
                    if not reason:
                        ever_ready = True
                        self.one_is_ready.set()
                        self.status, self.error, self.port, self._failed_starts = "ready", None, self._taken[0], 0
                        self._note(f"ready after {time.monotonic() - began:.1f} s at {self.url}")
                        reason = await self._until_down(session, process)
                self.status, self.metrics = "restarting", None
                await self._stop()
                self.error = self._explain(reason)
                self._note(reason)
                pause = budget.crash(time.monotonic(), ever_ready, self.one_is_ready.is_set())
                if pause is None:
                    self.status = "failed"
                    if not self.one_is_ready.is_set():
                        self._note("given up")
                        return
                    self._note(f"given up for now, tried again in {_AGAIN_SECONDS:.0f} s")
                    pause = _AGAIN_SECONDS
                await asyncio.sleep(pause)
                self.restarts += 1
        finally:
            await self._stop()
            if self.status != "failed":
                self.status = "stopped"

    def _take_ports(self) -> dict[str, str]:
        """What stands for a port in the command, and the port."""
        # Where the one before was ready, so that what it left unproven is known to be of this place.
        # Two starts that fail there may be for want of the port, whoever it is that has it.
        wanted = self.port if self._failed_starts < _STARTS_ON_PORT else 0
        self._failed_starts += 1
        for port in self._taken:
            if port != wanted:
                self.ports.give_back(port)
        self._taken = [self.ports.take(wanted)]
        found = {PORT: str(self._taken[0])}
        if OTHER_PORT in self.plan.command:
            self._taken.append(self.ports.take())
            found[OTHER_PORT] = str(self._taken[1])
        return found

    def _note(self, text: str) -> None:
        """A line in the keeper's log."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        say(f"{now} server {self.index}: {text}")

    def _explain(self, reason: str) -> str:
        lines = "".join(f"\n  {line}" for line in last_lines(self.log))
        return f"server {self.index} {reason}; last lines of {self.log}:{lines or ' (empty)'}"

    def _start(self) -> subprocess.Popen[bytes]:
        ports = self._take_ports()
        self.url = f"http://127.0.0.1:{ports[PORT]}"
        self.incarnation += 1
        self.status = "starting" if self.restarts == 0 else "restarting"
        command = list(self.plan.command)
        for mark, port in ports.items():
            command = [argument.replace(mark, port) for argument in command]
        environment = os.environ | {
            "PYTHONUNBUFFERED": "1",
            # Without it setproctitle, which SGLang and vLLM use, overwrites what the sweep looks for in /proc.
            "SPT_NOENV": "1",
            **self.plan.env,
            processes.MARKER: str(self.directory),
            processes.SERVER: str(self.index),
        }
        environment |= without_proxy(environment)
        environment["PYTHONPATH"] = replica.with_project(environment.get("PYTHONPATH"))
        self.log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        with open(self.log, "ab") as log:
            devices = self.plan.env.get("CUDA_VISIBLE_DEVICES")
            words = [f"CUDA_VISIBLE_DEVICES={devices}", *command] if devices else command
            with contextlib.suppress(OSError):  # a full disk
                os.write(
                    log.fileno(), f"=== {datetime.now().isoformat(timespec='seconds')} {' '.join(words)}\n".encode()
                )
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.lib.fleet.replica", "--", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._note(f"started on port {ports[PORT]}, process {self.process.pid}")
        return self.process

    async def _stop(self) -> None:
        """End the server and everything that it left behind. Safe to call again, and when cancelled."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.stdin:
            process.stdin.close()  # the replica sees the end of its input and stops the server
        patience = time.monotonic() + replica.GRACE + 10
        while process.poll() is None and time.monotonic() < patience:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(processes.sweep, str(self.directory), self.index)
        process.wait()

    async def _until_ready(self, session: aiohttp.ClientSession, process: subprocess.Popen[bytes]) -> str | None:
        """Wait for the first generated token. Returns what went wrong, None when it is ready."""
        began, last = time.monotonic(), ""
        while True:
            if (code := process.poll()) is not None:
                return f"ended with exit code {code} after {time.monotonic() - began:.0f} s, before it was ready"
            left = self.patience.start_timeout - (time.monotonic() - began)
            if left <= 0:
                return f"was not ready after {self.patience.start_timeout:.0f} s (engine.launch.start_timeout){last}"
            # The first answer may compile kernels for minutes.
            if reply := await self._first_answer(session, process, left):
                if reply.status == 200:
                    return None
                words = f"HTTP {reply.status}: {error_details(reply.body)[0]}"
                if reply.status in _REFUSALS:
                    key = reply.status in (401, 403)
                    return f"refuses its first request: {words}" + (
                        ": name its key in engine.api_key_env" if key else ""
                    )
                last = f"; its last answer: {words}"
            await asyncio.sleep(_POLL)

    async def _until_down(self, session: aiohttp.ClientSession, process: subprocess.Popen[bytes]) -> str:
        """Watch a ready server. Returns why it can't be used any more."""
        watch = health.ProgressWatch(self.patience.hang_seconds, time.monotonic())
        while True:
            if (code := process.poll()) is not None:
                return f"ended with exit code {code}"
            self.metrics, mark = await self._read_metrics(session)
            if watch.observe(time.monotonic(), self.metrics, mark):
                reply = await self._first_answer(session, process, min(_TOKEN_SECONDS, self.patience.hang_seconds))
                if reply is None or reply.status != 200:
                    return f"made no token for {self.patience.hang_seconds:.0f} s: it hangs"
                watch.alive(time.monotonic())
            looked = time.monotonic()
            while process.poll() is None and time.monotonic() - looked < _WATCH:
                await asyncio.sleep(_POLL)

    async def _first_answer(
        self, session: aiohttp.ClientSession, process: subprocess.Popen[bytes], seconds: float
    ) -> Reply | None:
        """What the server answers to a request for one token within `seconds`; None at once when it ends meanwhile."""
        request = asyncio.create_task(self._ask(session, seconds))
        try:
            while not request.done() and process.poll() is None:
                await asyncio.wait([request], timeout=_POLL)
            return request.result() if request.done() else None
        finally:
            request.cancel()

    async def _ask(self, session: aiohttp.ClientSession, seconds: float) -> Reply | None:
        call, timeout = self.one_token, aiohttp.ClientTimeout(total=seconds)
        try:
            async with session.request(
                call.method, self.url + call.path, data=call.body, headers=call.headers, timeout=timeout
            ) as answer:
                return Reply(answer.status, {}, await answer.read())
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def _read_metrics(self, session: aiohttp.ClientSession) -> tuple[EngineMetrics | None, tuple]:
        """The server's load; (None, ()) when it doesn't answer."""
        timeout = aiohttp.ClientTimeout(total=_METRICS_SECONDS)
        try:
            async with session.get(self.url + self.names.path, timeout=timeout) as answer:
                if answer.status != 200:
                    return None, ()
                return read_metrics(self.names, await answer.text())
        except (aiohttp.ClientError, TimeoutError):
            return None, ()
