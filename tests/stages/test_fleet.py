"""The fleet lease on real processes: who shares servers, and that nothing is left however a run ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests

from scripts import stop_servers
from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.provenance import PROJECT
from scripts.lib.engines.llamacpp import LlamaCpp
from scripts.lib.fleet import processes
from scripts.lib.fleet.folder import FleetFolder, machine_label
from scripts.lib.fleet.lease import lease
from scripts.lib.fleet.processes import ended
from scripts.lib.target.location import embedded_model


def until(condition: Callable[[], object], seconds: float = 60) -> object:
    """The condition's first true value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


class Run:
    """A results folder with its jobs. Nothing of it is left when the test ends, or the test fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.jobs: list[subprocess.Popen] = []
        durable.write_json(folder / "target" / "target.json", {"context_length": 512})
        self.fleet = FleetFolder.of(self.state)

    def configure(self, name: str = "config", kind: str = "llamacpp", endpoints: tuple = (), **launch: object) -> Path:
        settings = {"linger": 0.2, "slots": 2, "threads": 1, **launch}
        path = self.folder / f"{name}.json"
        engine = {"kind": kind, "endpoints": endpoints, "launch": settings}
        durable.write_json(path, {"datasets": {"a": {"class": "B", "source": "a.jsonl"}}, "engine": engine})
        return path

    def toy(self, name: str = "config", does: str = "", **launch: object) -> Path:
        program = self.folder / "environment" / "bin" / "llama-server"
        program.parent.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).with_name("toy_server.py").read_text()
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(0o755)
        return self.configure(name, environment=str(program.parents[1]), env={"TOY": does}, **launch)

    def job(self, config: Path, lane: str = "short") -> "Job":
        job = Job(config, self.folder / "target", self.state, lane)
        self.jobs.append(job.process)
        return job

    def left(self) -> list[psutil.Process]:
        """Processes of the fleet: servers by their environment, the keeper by its command line."""
        keepers = [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.fleet.directory) in (process.info["cmdline"] or [])
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]
        return keepers + processes.marked(str(self.fleet.directory))

    def keeper(self) -> int:
        return self.fleet.read(self.fleet.fleet)["keeper"]

    def servers(self) -> list[dict]:
        return self.fleet.read(self.fleet.fleet).get("servers", [])

    def all_gone(self) -> bool:
        return not self.left()


class Job:
    def __init__(self, config: Path, target: Path, state: Path, lane: str) -> None:
        command = [sys.executable, "-m", "tests.stages.lease_holder", config, target, state, lane]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT
        )

    def ask(self, request: str = "endpoints") -> object:
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for job in run.jobs:
        job.kill()
        job.wait()
    try:
        until(run.all_gone)
    finally:
        for process in run.left():
            process.kill()
        shutil.rmtree(run.fleet.directory)


def generated(url: str) -> list[int]:
    body = {"prompt": [1, 2, 3], "n_predict": 4, "return_tokens": True, "ignore_eos": True}
    return requests.post(f"{url}/completion", json=body, timeout=60).json()["tokens"]


def test_jobs_share_one_server_which_ends_with_the_last_of_them(run: Run) -> None:
    config = run.configure()
    jobs = [run.job(config) for _ in range(3)]
    answers = [job.ask() for job in jobs]
    assert answers[0] == answers[1] == answers[2]
    [[url, _]] = answers[0]
    assert url.startswith("http://127.0.0.1:")
    assert len(generated(url)) == 4
    jobs[0].kill()
    jobs[1].finish()
    assert jobs[2].ask() == answers[0]
    jobs[2].kill()
    until(run.all_gone)
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=5)


def test_server_listens_on_loopback_only(run: Run) -> None:
    [[url, _]] = run.job(run.configure()).ask()
    port = int(url.rsplit(":", 1)[1])
    listening = [
        connection.laddr
        for process in run.left()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", port)}


def test_killed_keeper_leaves_nothing_and_its_job_gets_the_next_one(run: Run) -> None:
    job = run.job(run.configure())
    [[url, incarnation]] = job.ask()
    keeper, before = run.keeper(), run.left()
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not run.fleet.keeper_lives())
    [[new_url, new_incarnation]] = job.ask()
    assert run.keeper() != keeper
    assert new_url == url
    assert new_incarnation > incarnation
    assert len(generated(new_url)) == 4
    until(lambda: all(map(ended, before)))


def test_killed_keeper_without_jobs_leaves_nothing(run: Run) -> None:
    job = run.job(run.toy(does="family", linger=600))
    job.ask()
    job.kill()
    assert run.left()
    os.kill(run.keeper(), signal.SIGKILL)
    until(run.all_gone)


def test_everything_killed_at_once_is_swept_up_by_stop_servers(run: Run) -> None:
    job = run.job(run.toy(does="family", linger=600))
    [[url, _]] = job.ask()
    child = int(requests.get(f"{url}/child", timeout=5).text)
    job.kill()
    # Keeper, replica and server die together, as under `killall -9 python`.
    for process in run.left():
        if process.pid != child:
            process.kill()
    until(lambda: [process.pid for process in run.left()] == [child])
    assert stop_servers.main(["--state", str(run.state)]) == 0
    assert run.all_gone()


def test_everything_killed_at_once_is_swept_up_by_the_next_keeper(run: Run) -> None:
    job = run.job(run.toy(does="family"))
    [[url, _]] = job.ask()
    child = psutil.Process(int(requests.get(f"{url}/child", timeout=5).text))
    for process in run.left():
        if process.pid != child.pid:
            process.kill()
    until(lambda: not run.fleet.keeper_lives())
    job.ask()
    until(lambda: ended(child))


def test_killed_replica_takes_its_family_along_and_the_server_comes_back(run: Run) -> None:
    job = run.job(run.toy(does="family"))
    [[url, incarnation]] = job.ask()
    child = psutil.Process(int(requests.get(f"{url}/child", timeout=5).text))
    os.kill(run.servers()[0]["pid"], signal.SIGKILL)
    until(lambda: run.servers()[0]["status"] == "ready" and run.servers()[0]["incarnation"] > incarnation)
    assert ended(child)
    assert job.ask() == [[run.servers()[0]["url"], run.servers()[0]["incarnation"]]]


def test_stop_servers_ends_the_linger(run: Run) -> None:
    job = run.job(run.toy(linger=600))
    job.ask()
    job.finish()
    assert run.left()
    assert stop_servers.main(["--state", str(run.state)]) == 0
    assert run.all_gone()


def test_stop_servers_leaves_servers_in_use(run: Run, capsys: pytest.CaptureFixture) -> None:
    job = run.job(run.toy())
    endpoints = job.ask()
    assert stop_servers.main(["--state", str(run.state)]) == 0
    assert "1 jobs are using them" in capsys.readouterr().err
    assert job.ask() == endpoints


def test_keeper_holds_nothing_of_the_job_that_started_it(run: Run) -> None:
    job = run.job(run.toy(linger=600))
    job.ask()
    job.process.kill()
    # The pipes end with the job, though the keeper lives on.
    assert job.process.stdout.read() == job.process.stderr.read() == ""
    keeper = psutil.Process(run.keeper())
    assert os.getsid(keeper.pid) == keeper.pid
    assert keeper.terminal() is None
    leases = [Path(f"/proc/{p.pid}/fd/{fd}") for p in run.left() for fd in os.listdir(f"/proc/{p.pid}/fd")]
    held = [path for path in leases if path.exists() and path.samefile(run.fleet.leases_lock)]
    assert [path.parts[2] for path in held] == [str(keeper.pid)]
    assert stop_servers.main(["--state", str(run.state)]) == 0


def test_jobs_of_another_configuration_get_other_servers(run: Run) -> None:
    first = run.job(run.toy("first", linger=600))
    [[_, incarnation]] = first.ask()
    keeper = run.keeper()
    first.finish()
    [[_, other]] = run.job(run.toy("second", slots=3)).ask()
    assert run.keeper() != keeper
    assert other != incarnation


def test_lane_ceiling_is_shared_by_live_leases(run: Run) -> None:
    config = run.toy()
    jobs = [run.job(config) for _ in range(3)]
    for job in jobs:
        job.ask()
    other = run.job(config, lane="long/er")
    other.ask()
    assert sorted(job.ask("share 8") for job in jobs) == [2, 3, 3]
    assert other.ask("share 8") == 8
    jobs[0].kill()
    assert [job.ask("share 8") for job in jobs[1:]] == [4, 4]
    assert jobs[1].ask("share 1") == 1


def test_external_endpoints_are_leased_but_never_started(run: Run) -> None:
    config = run.configure(endpoints=("http://127.0.0.1:9/",))
    jobs = [run.job(config) for _ in range(2)]
    assert [job.ask() for job in jobs] == [[["http://127.0.0.1:9", 0]]] * 2
    assert [job.ask("share 10") for job in jobs] == [5, 5]
    assert run.all_gone()


def test_serve_holds_the_servers_until_interrupted(run: Run) -> None:
    command = [sys.executable, "-m", "scripts.serve", "--config", run.toy(), "--state", run.state]
    serving = subprocess.Popen(
        [*command, "--target", run.folder / "target"], stderr=subprocess.PIPE, text=True, cwd=PROJECT
    )
    run.jobs.append(serving)
    assert serving.stderr.readline() == "starting the servers\n"
    assert serving.stderr.readline() == f"ready: {run.servers()[0]['url']}\n"
    assert run.job(run.toy()).ask() == [[run.servers()[0]["url"], 1]]
    serving.send_signal(signal.SIGINT)
    assert serving.wait(30) == 128 + signal.SIGINT


def test_failed_start_shows_the_servers_last_lines(run: Run) -> None:
    job = run.job(run.toy(does="crash"))
    error = job.ask()
    assert "server 0 ended with exit code 3" in error
    assert "toy: no kernel image is available" in error
    assert str(run.state / "servers") in error
    # The next job of the run fails at once instead of loading the model again.
    assert run.job(run.toy(does="crash")).ask() == error
    assert run.servers()[0]["restarts"] == 1


def test_broken_model_file_fails_with_the_engines_own_words(run: Run) -> None:
    broken = run.folder / "broken.gguf"
    broken.write_bytes(embedded_model().read_bytes()[:20_000_000])
    config = run.configure(crash_budget=0)
    settings = durable.read_json(config)
    durable.write_json(config, settings | {"model": {"name": str(broken)}})
    error = run.job(config).ask()
    assert "before it was ready" in error
    assert "failed to load model" in error


def test_crashed_server_comes_back_until_its_budget_is_used_up(run: Run) -> None:
    job = run.job(run.toy(crash_budget=1))
    [[url, incarnation]] = job.ask()
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{url}/do/crash", timeout=5)
    until(lambda: run.servers()[0]["incarnation"] > incarnation and run.servers()[0]["status"] == "ready")
    [[same_url, _]] = job.ask()
    assert same_url == url  # so that what the first one left unproven falls when this one fails its canary
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{url}/do/crash", timeout=5)
    until(lambda: run.servers()[0]["status"] == "failed")
    assert "no kernel image" in job.ask()


def test_hung_server_is_replaced(run: Run) -> None:
    job = run.job(run.toy(hang_seconds=0.5))
    [[url, incarnation]] = job.ask()
    requests.post(f"{url}/do/hang", timeout=5)
    until(lambda: run.servers()[0]["incarnation"] > incarnation and run.servers()[0]["status"] == "ready")
    [[new_url, _]] = job.ask()
    assert new_url == url


def test_one_of_two_servers_is_given_up_and_the_other_serves(run: Run) -> None:
    job = run.job(run.toy(replicas=2, crash_budget=0))
    job.ask()
    both = until(lambda: [s for s in run.servers() if s["status"] == "ready"] if len(run.servers()) == 2 else [])
    until(lambda: all(s["status"] == "ready" for s in run.servers()))
    both = run.servers()
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{both[0]['url']}/do/crash", timeout=5)
    until(lambda: run.servers()[0]["status"] == "failed")
    assert job.ask() == [[both[1]["url"], both[1]["incarnation"]]]
    job.process.stdin.close()
    assert (
        "given up for now, tried again every few minutes, after 0 restarts: server 0 ended with exit code 3"
        in job.process.stderr.read()
    )


@pytest.mark.parametrize("how", [signal.SIGTERM, None])
def test_replica_ends_a_server_that_ignores_sigterm(tmp_path: Path, how: signal.Signals | None) -> None:
    script = Path(__file__).with_name("toy_server.py")
    log = tmp_path / "log"
    with open(log, "wb") as file:
        replica = subprocess.Popen(
            [sys.executable, "-m", "scripts.lib.fleet.replica", "--grace", "0.2", "--",
             sys.executable, script, "--port", "0"],
            stdin=subprocess.PIPE, stdout=file, stderr=file, cwd=PROJECT,
            env=os.environ | {"TOY": "stubborn,family"},
        )  # fmt: skip
    me = psutil.Process(replica.pid)
    family = until(lambda: len(found := me.children(recursive=True)) == 2 and found)
    until(lambda: any("sleep" in process.name() for process in family))
    if how:
        replica.send_signal(how)
    else:
        replica.stdin.close()
    assert replica.wait(30) == 128 + signal.SIGKILL
    assert all(map(ended, family))


def test_a_server_has_its_port_again_though_its_first_start_fails(run: Run) -> None:
    """As where the memory of the one before is not free yet; also when its keeper is killed meanwhile."""
    job = run.job(run.toy(crash_budget=5))
    [[url, incarnation]] = job.ask()
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{url}/do/relapse", timeout=5)
    until(lambda: run.servers()[0]["incarnation"] > incarnation + 1 and run.servers()[0]["status"] == "ready")
    [[again, incarnation]] = job.ask()
    assert again == url
    keeper = run.keeper()
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{url}/do/crash", timeout=5)
    until(lambda: run.servers()[0]["status"] == "restarting")
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not run.fleet.keeper_lives())
    [[after, later]] = job.ask()
    assert (after, later > incarnation) == (url, True)


def bound(own: socket.socket, address: tuple[str, int]) -> bool:
    try:
        own.bind(address)
    except OSError:  # the server is still ending
        return False
    return True


def test_a_port_that_somebody_has_taken_is_left_to_them(run: Run) -> None:
    job = run.job(run.toy(crash_budget=1))
    [[url, incarnation]] = job.ask()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(run.servers()[0]["pid"], signal.SIGSTOP)  # the replica: nothing is started anew meanwhile
        with pytest.raises(requests.ConnectionError):
            requests.post(f"{url}/do/crash", timeout=5)
        address = "127.0.0.1", int(url.rsplit(":", 1)[1])
        until(lambda: bound(other, address))
        other.listen()
        os.kill(run.servers()[0]["pid"], signal.SIGCONT)
        until(lambda: run.servers()[0]["incarnation"] > incarnation and run.servers()[0]["status"] == "ready")
        [[new_url, _]] = job.ask()
    assert new_url != url


def test_a_full_temporary_folder_costs_no_server(run: Run) -> None:
    job = run.job(run.toy())
    [[url, incarnation]] = job.ask()
    keeper = run.keeper()
    full = run.fleet.directory / f".fleet.json.{keeper}"
    full.symlink_to("/dev/full")  # what the keeper writes there is refused with ENOSPC
    log = run.state / "servers" / machine_label() / "keeper.log"
    until(lambda: f"warning: [Errno 28] No space left on device: '{run.fleet.fleet}'" in log.read_text())
    requests.get(url, timeout=5).raise_for_status()
    until(lambda: requests.get(url, timeout=5).ok and psutil.pid_exists(keeper))
    with contextlib.suppress(requests.ConnectionError):
        requests.post(f"{url}/do/crash", timeout=5)
    until(lambda: "started on port" in log.read_text().partition("ended with exit code 3")[2])
    assert job.ask() == [[url, incarnation]]  # the last that could be published
    full.unlink()
    until(lambda: run.servers()[0]["incarnation"] > incarnation and run.servers()[0]["status"] == "ready")
    assert run.keeper() == keeper
    assert log.read_text().count("No space left on device") == 1


@pytest.mark.parametrize(
    "left", ["", "{", "[]", '{"servers": null}', '{"keeper": 1, "signature": "a", "servers": [{}]}']
)
def test_a_fleet_file_that_cannot_be_read_is_made_anew(run: Run, left: str) -> None:
    run.fleet.fleet.write_text(left)
    [[url, incarnation]] = run.job(run.toy()).ask()
    assert (run.servers()[0]["url"], run.servers()[0]["incarnation"]) == (url, incarnation)


def test_logs_that_were_cleared_away_are_begun_anew(run: Run) -> None:
    job = run.job(run.toy())
    [[url, incarnation]] = job.ask()
    shutil.rmtree(run.state / "servers")
    with contextlib.suppress(requests.ConnectionError):
        requests.post(f"{url}/do/crash", timeout=5)
    until(lambda: run.servers()[0]["incarnation"] > incarnation and run.servers()[0]["status"] == "ready")
    assert Path(run.servers()[0]["log"]).is_file()


def test_a_server_whose_log_cannot_be_opened_takes_no_other_along(run: Run) -> None:
    job = run.job(run.toy(replicas=2, crash_budget=1))
    until(lambda: [server["status"] for server in run.servers()] == ["ready", "ready"] if job.ask() else None)
    keeper, log = run.keeper(), Path(run.servers()[0]["log"])
    log.unlink()
    log.mkdir()
    with contextlib.suppress(requests.ConnectionError):
        requests.post(f"{run.servers()[0]['url']}/do/crash", timeout=5)
    until(lambda: run.servers()[0]["status"] == "failed")
    assert "could not be started" in run.servers()[0]["error"]
    assert job.ask() == [[run.servers()[1]["url"], run.servers()[1]["incarnation"]]]
    assert run.keeper() == keeper


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is one of the engines whose first start compiles."""
    monkeypatch.setattr(LlamaCpp, "compiles", True)


def order_of_starts(run: Run) -> list[tuple[int, str]]:
    """(server, started or ready), as the keeper's log has them."""
    [log] = run.state.glob("servers/*/keeper.log")
    found = re.findall(r"server (\d): (started|ready)", log.read_text())
    return [(int(server), what) for server, what in found]


def test_while_caches_are_cold_the_first_server_starts_alone(run: Run, compiling: None) -> None:
    config = load_config(run.toy(replicas=3))
    with lease(config, run.folder / "target", run.state, "short") as held:
        until(lambda: len(held.endpoints()) == 3)
    until(run.all_gone)
    starts = order_of_starts(run)
    assert starts[:2] == [(0, "started"), (0, "ready")]
    assert sorted(starts[2:]) == [(1, "ready"), (1, "started"), (2, "ready"), (2, "started")]
    # The next fleet of such servers finds them warm.
    with lease(config, run.folder / "target", run.state, "short") as held:
        until(lambda: len(held.endpoints()) == 3)
    until(run.all_gone)
    assert sorted(order_of_starts(run)[6:9]) == [(0, "started"), (1, "started"), (2, "started")]


def test_when_the_first_server_is_given_up_the_others_start(run: Run, compiling: None) -> None:
    config = load_config(run.toy(replicas=2, crash_budget=0))
    relapse = run.folder / "environment" / "bin" / "relapse"
    relapse.touch()
    with lease(config, run.folder / "target", run.state, "short") as held:
        [endpoint] = held.endpoints()
        assert endpoint.url == run.servers()[1]["url"]


def test_servers_run_foreign_code_from_folders_of_their_own(run: Run) -> None:
    path = run.toy(replicas=2)
    settings = durable.read_json(path)
    durable.write_json(path, {**settings, "model": {"trust_remote_code": True}})
    with lease(load_config(path), run.folder / "target", run.state, "short") as held:
        held.endpoints()
        plans = run.fleet.read(run.fleet.launch)["plans"]
    assert len({plan["env"]["HF_MODULES_CACHE"] for plan in plans}) == 2
