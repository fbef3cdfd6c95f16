"""A throw-away copy of the project in which the real workflow runs on the real engine."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from scripts.lib.fleet.folder import FleetFolder
from scripts.lib.fleet.processes import MARKER

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["Snakefile", "rules", "scripts", "config", "profiles", "envs"]


class Project:
    """The project's files in an own folder, with a config of the test's making."""

    patience = 300  # seconds that one Snakemake run may take

    def __init__(self, folder: Path, config: dict):
        self.folder = folder
        folder.mkdir(parents=True)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / part)
        self.configure(config)

    def configure(self, config: dict) -> None:
        self.config = config
        (self.folder / "test.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def environment(self) -> dict[str, str]:
        """PATH as in an activated environment; nothing of pytest's own."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "PYTHONPATH": "", "NO_COLOR": "1"}

    def command(self, *arguments: str, cores: int = 4) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", str(cores), *arguments, "--configfile", "test.yaml"]

    def snakemake(self, *arguments: str, cores: int = 4, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Snakemake to its end. With `check`, a failure shows everything that it printed."""
        process = subprocess.Popen(
            self.command(*arguments, cores=cores),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.patience)
        except BaseException:
            kill_group(process)  # its jobs too
            raise
        done = subprocess.CompletedProcess(process.args, process.returncode, output)
        if check and done.returncode != 0:
            raise AssertionError(f"snakemake {' '.join(arguments)} failed:\n{done.stdout}")
        return done

    def start(self, *arguments: str, cores: int = 4) -> subprocess.Popen:
        """Start Snakemake in its own process group, to be killed with all its jobs."""
        return subprocess.Popen(
            self.command(*arguments, cores=cores),
            cwd=self.folder,
            env=self.environment(),
            stdout=open(self.folder / "killed.log", "ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, module: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of the project's own commands."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{module} failed:\n{done.stdout}\n{done.stderr}")
        return done

    def processes(self) -> list[psutil.Process]:
        """Every process of this project: jobs (by their folder), keeper and servers (by where they meet)."""
        fleet = str(FleetFolder.of(self.result("state")).directory)
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join([*process.cmdline(), process.environ().get(MARKER, "")])
                if Path(process.cwd()) == self.folder or str(self.folder) in words or fleet in words:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def result(self, path: str) -> Path:
        return self.folder / "results" / path


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until `condition` holds. Not a fixed sleep: it ends at once, and fails with `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain for {what}")
        time.sleep(0.02)


def kill_group(process: subprocess.Popen, signal_number: int = signal.SIGKILL) -> None:
    """Signal Snakemake and all its jobs at once, as a power cut would, and reap it."""
    os.killpg(process.pid, signal_number)
    process.wait(60)
