"""The trainers' environment: made once under .venvs/, never the client's."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = [HERE / "requirements.txt", HERE / "trainers.txt"]


@pytest.fixture(scope="session")
def trainers_python() -> Path:
    """Python of an environment that holds the trainers' loaders."""
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in REQUIREMENTS)).hexdigest()
    folder = ROOT / ".venvs/trainers"
    python, stamp = folder / "bin/python", folder / "requirements.sha256"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-r", REQUIREMENTS[0]], check=True)
        subprocess.run([*install, "--no-deps", "-r", REQUIREMENTS[1]], check=True)
        stamp.write_text(wanted)
    return python


@pytest.fixture
def load(trainers_python, tmp_path):
    """`load(loader, export folder, target folder)`: the rows that a trainer's own code reads."""

    def loaded(loader: str, export: Path, target: Path) -> list[dict]:
        environment = {
            **os.environ,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [trainers_python, "-W", "ignore", HERE / "load.py", loader, export / "data", target],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return loaded
