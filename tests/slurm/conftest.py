"""A real Slurm of one node with two GPUs (devices that nothing answers at), for the time of a test session."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from scripts.lib.core.provenance import PROJECT

GPUS = 2
CLUSTER = "drafter-corpus-test"
_SETTINGS = Path("/etc/slurm")
_FILES = ("slurm.conf", "gres.conf", "cgroup.conf")


@dataclass
class Slurm:
    """The running cluster. `plugin` is a folder with Snakemake's Slurm executor, for PYTHONPATH."""

    folder: Path
    plugin: Path
    host: str

    def run(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def jobs(self) -> list[tuple[str, str, str]]:
        """(job id, state, comment) of every job that Slurm remembers; the plugin's comment names the rule."""
        lines = self.run("squeue", "--all", "--noheader", "--states=all", "--format=%i|%T|%k").splitlines()
        return [tuple(line.split("|", 2)) for line in lines]

    def kill_node(self) -> None:
        """Kill everything of the node at once (its daemon, those that supervise jobs, all processes of the jobs).

        Slurm is told, as a health check does: by itself it believes the jobs alive until the daemon has been silent
        for SlurmdTimeout, 300 s by default.
        """
        dying = []
        for process in psutil.process_iter(["name", "cwd", "environ"]):
            daemon = process.info["name"] in ("slurmd", "slurmstepd") and process.info["cwd"] == str(self.folder)
            script = (process.info["environ"] or {}).get("SLURM_CLUSTER_NAME") == CLUSTER
            if daemon or script:
                dying.append(process)
        for process in dying:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(dying, timeout=30)
        self.run("scontrol", "update", f"nodename={self.host}", "state=down", "reason=died")

    def boot_node(self) -> None:
        """The node comes back; returns when it is taken in again (ReturnToService)."""
        with open(self.folder / "daemons.log", "ab") as log:
            subprocess.run(["slurmd", "-N", self.host], check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.await_node()

    def await_node(self) -> None:
        end = time.monotonic() + 60
        while "idle" not in self.run("sinfo", "--noheader", "--format=%T"):
            assert time.monotonic() < end, (self.folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)


def _shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def _install() -> None:
    if shutil.which("slurmctld") and shutil.which("munged"):
        return
    _shell("apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge")


def _configure(folder: Path, host: str) -> None:
    for name in ("state", "spool", "gpu"):
        (folder / name).mkdir(parents=True)
    for index in range(GPUS):
        # Slurm sets CUDA_VISIBLE_DEVICES for character devices only; 195 is the NVIDIA driver's number.
        os.mknod(folder / "gpu" / f"nvidia{index}", 0o600 | 0o020000, os.makedev(195, index))
    settings = {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "SlurmctldPort": 16817,
        "SlurmdPort": 16818,
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,sched_min_interval=0",
        "MinJobAge": 600,
        "KillWait": 5,
        "ReturnToService": 2,
        "GresTypes": "gpu",
    }
    node = f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=6000 Gres=gpu:{GPUS}"
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [f"{node} State=UNKNOWN", f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP"]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu/nvidia[0-{GPUS - 1}]\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    _SETTINGS.mkdir(exist_ok=True)
    for name in _FILES:
        # The executor's jobs lose SLURM_CONF, so the files must be where Slurm looks by itself.
        assert not (_SETTINGS / name).exists(), f"{_SETTINGS / name}: this machine has a Slurm of its own"
        (_SETTINGS / name).symlink_to(folder / name)


def _stop(folder: Path) -> None:
    for name in ("slurmd", "slurmctld"):
        file = folder / f"{name}.pid"
        if file.exists():
            pid = int(file.read_text())
            subprocess.run(["kill", str(pid)])
            end = time.monotonic() + 30
            while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
                time.sleep(0.1)
    for name in _FILES:
        # Left behind, they would make every later Snakemake with the plugin wait for the dead controller.
        (_SETTINGS / name).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster, stopped afterwards. Needs root, as Slurm does."""
    assert os.getuid() == 0, "a Slurm of one's own needs root"
    _install()
    folder, plugin = tmp_path_factory.mktemp("slurm"), tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", plugin]
    subprocess.run([*pip, "--requirement", PROJECT / "envs" / "slurm.txt"], check=True)
    host = socket.gethostname().split(".")[0]
    _shell("mkdir -p /run/munge && chown munge:munge /run/munge && test -e /etc/munge/munge.key || mungekey")
    munge = Path("/run/munge/munged.pid")
    others = munge.exists() and Path(f"/proc/{munge.read_text().strip()}").exists()
    if not others:
        _shell("runuser -u munge -- munged")
    _configure(folder, host)
    try:
        with open(folder / "daemons.log", "wb") as log:
            for command in (["slurmctld", "-c"], ["slurmd", "-N", host]):
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        cluster = Slurm(folder, plugin, host)
        cluster.await_node()
        yield cluster
    finally:
        _stop(folder)
        if not others:
            subprocess.run(["kill", munge.read_text().strip()])
