"""Where the jobs, the keeper and the servers of one run meet: a folder of locks on a local disk.

    keeper.lock     held exclusively by the keeper for its life
    leases.lock     held shared by every lease; the keeper takes it exclusively to see that none is left
    lanes/{lane}/   one locked file per lease, to count them
    launch.json     what the keeper is to run, written by the lease that starts it
    fleet.json      what the keeper says about its servers, replaced atomically
    stop            asks the keeper not to linger

Local, because the locks of network file systems don't always survive a kill and the processes that
meet here are on one machine anyway. The temporary folder and not XDG_RUNTIME_DIR, which systemd
removes at logout while a run under nohup goes on.
"""

import contextlib
import os
import shutil
import socket
import stat
from pathlib import Path

import orjson
from pydantic import BaseModel, ValidationError

from scripts.lib.core.errors import UserError
from scripts.lib.core.locks import Lock
from scripts.lib.core.provenance import digest
from scripts.lib.engines.launching import ServerPlan
from scripts.lib.engines.metrics import EngineMetrics


def machine_label() -> str:
    """Name of this machine and, inside Slurm, of the allocation's job and step.

    Slurm ends a step's processes with the step, so a keeper can't serve other steps.
    """
    parts = [socket.gethostname()]
    parts += [os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if os.environ.get(name)]
    return "-".join(parts)


def temporary_folder() -> Path:
    """TMPDIR or what stands for it, else /tmp.

    Not tempfile's, which goes elsewhere when that is full: the job would start a second fleet there, beside the first.
    """
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    for name in (*named, "/tmp", "/var/tmp"):
        if name and os.path.isdir(name):
            return Path(name).absolute()
    raise UserError("there is no folder for temporary files: set TMPDIR to one on a local disk")


def private_directory(path: Path) -> Path:
    """Create `path` for this user only. Raises UserError when it is somebody else's or open to others."""
    with contextlib.suppress(FileExistsError):  # told below
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(
            f"{path}: must be a folder that only you may enter: remove it, or set TMPDIR to a folder of your own"
        )
    return path


class PublishedServer(BaseModel):
    """What a keeper says about one of its servers."""

    index: int
    url: str
    port: int  # that it was ready on last; 0 if it never was
    incarnation: int  # changes with each start
    status: str  # starting | ready | restarting | failed | stopped
    restarts: int
    error: str | None  # why it went down last, with the last lines of its log
    log: str
    pid: int | None
    metrics: EngineMetrics | None  # while it is ready


class PublishedFleet(BaseModel):
    """fleet.json."""

    keeper: int  # its process
    signature: str  # of the configuration that its servers are for
    servers: list[PublishedServer]


class FleetFolder:
    """The folder of one run's fleet on this machine (in this allocation)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.keeper_lock = directory / "keeper.lock"
        self.leases_lock = directory / "leases.lock"
        self.lanes = directory / "lanes"
        self.launch = directory / "launch.json"
        self.fleet = directory / "fleet.json"
        self.stop = directory / "stop"

    @property
    def ports(self) -> Path:
        """Where all fleets of this user on this machine lock the ports of their servers."""
        return private_directory(self.directory.parent / "ports")

    @property
    def downloads(self) -> Path:
        """The lock of whoever fetches weights to this machine."""
        return self.directory.parent / "downloads.lock"

    def warm(self, plan: ServerPlan) -> Path:
        """A file that is there once such a server has been ready on this machine: its kernels are compiled."""
        apart = {"CUDA_VISIBLE_DEVICES", "MAX_JOBS", "FLASHINFER_JIT_PREBUILD_MAX_JOBS", "HF_MODULES_CACHE"}
        env = {name: value for name, value in plan.env.items() if name not in apart}
        return private_directory(self.directory.parent / "warm") / digest([plan.command, env])

    @classmethod
    def of(cls, state: Path) -> "FleetFolder":
        """The folder of the run whose state folder is `state`; created when it doesn't exist."""
        key = digest([os.getuid(), machine_label(), str(Path(state).resolve())])
        base = private_directory(temporary_folder() / f"drafter-corpus-{os.getuid()}")
        return cls(private_directory(base / key))

    def keeper_lives(self) -> bool:
        """Whether a keeper holds this folder."""
        with Lock(self.keeper_lock) as lock:
            return not lock.take(shared=True)

    def read(self, path: Path) -> dict:
        """A JSON file of the folder; {} when it isn't there (yet), or when a power cut or a full disk left no JSON object.

        It is made anew then.
        """
        try:
            value = orjson.loads(path.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def published(self) -> PublishedFleet | None:
        """What the keeper says; None when it hasn't said anything (yet), or nothing that can be read."""
        try:
            return PublishedFleet(**self.read(self.fleet))
        except ValidationError:
            return None

    def write(self, path: Path, value: object) -> None:
        """Replace a JSON file atomically. Not fsynced: nothing that it says outlives a power cut.

        Raises OSError that names the file.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(orjson.dumps(value))
            os.replace(temporary, path)
        except OSError as error:
            error.filename = str(path)
            raise

    def remove(self, path: Path) -> None:
        """Remove whatever is there under the name of one of the files."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    def is_full(self) -> bool:
        """Whether nothing more can be written here."""
        return os.statvfs(self.directory).f_bavail == 0
