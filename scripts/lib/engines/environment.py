"""Virtual environments that hold an inference server, apart from the client's.

Each is made from a complete lock, envs/{name}.txt, installed without resolving anything, so two
environments of one lock are alike. envs/{name}.in says what the lock was resolved from.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import PROJECT, digest

ENVIRONMENTS = PROJECT / "envs"
_DONE = "drafter-corpus.json"  # in the environment: says of which lock it is a complete installation
# In an .in file, in this order: what follows is taken as it is; what follows is left out of the lock.
_WITHOUT_DEPENDENCIES, _LEFT_OUT = "# --no-deps", "# --without"
# Published in several builds of one version: `==2.13.0` may be met by 2.13.0+cpu, `===2.13.0` may not.
_BUILDS = ("torch", "torchaudio", "torchvision")


def names() -> list[str]:
    """Server environments that there are locks for."""
    return sorted(
        path.stem for path in ENVIRONMENTS.glob("*.txt") if path.stem not in ("client", "dev", "embedded", "slurm")
    )


def create_environment(name: str, output: Path, say: Callable[[str], None], mend: Callable[[Path], None]) -> None:
    """Make the environment `name` in the folder `output`; do nothing when it is there and current.

    `mend` puts right what the wheels themselves got wrong.

    Raises UserError for an unknown name, a folder that holds something else, and a failed installation.
    """
    if name not in names():
        raise UserError(f"no server environment `{name}`; there are {', '.join(names())}")
    lock, overlay = ENVIRONMENTS / f"{name}.txt", ENVIRONMENTS / name
    added = sorted(path for path in overlay.rglob("*") if path.is_file() and path.suffix != ".md")
    wanted = digest([lock.read_text(), *(path.read_text() for path in added)])
    done = output / _DONE
    if done.exists() and durable.read_json(done).get("lock") == wanted:
        say(f"{output} is there and current")
        return
    if output.exists() and any(output.iterdir()):
        if not done.exists() and not (output / "pyvenv.cfg").exists():
            raise UserError(f"{output}: holds something that is not an environment: name another folder")
        shutil.rmtree(output)
    say(f"installing {lock.name} into {output}")
    _run([sys.executable, "-m", "venv", str(output)])
    _run([str(output / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--requirement", str(lock)])
    packages = next(output.glob("lib/python3.*/site-packages"))
    for path in added:
        target = packages / path.relative_to(overlay)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    mend(output)
    durable.write_json(done, {"name": name, "lock": wanted})
    say(f"{output} is ready")


def lock_environment(name: str, say: Callable[[str], None]) -> None:
    """Resolve envs/{name}.in into envs/{name}.txt, installing nothing."""
    source, lock = ENVIRONMENTS / f"{name}.in", ENVIRONMENTS / f"{name}.txt"
    if not source.is_file():
        raise UserError(f"{source}: no such file")
    wanted, _, left_out = source.read_text().partition(_LEFT_OUT)
    resolved, _, exact = wanted.partition(_WITHOUT_DEPENDENCIES)
    with tempfile.TemporaryDirectory() as folder:
        report, requirements = Path(folder) / "report.json", Path(folder) / "requirements.in"
        requirements.write_text(resolved)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        _run([*command, "--report", str(report), "--requirement", str(requirements)])
        installed = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    versions = {item["name"].lower().replace("_", "-"): item["version"] for item in installed}
    for package in left_out.splitlines()[1:]:
        if versions.pop(package, None) is None:
            raise UserError(f"{source}: `{package}` is to be left out, but nothing asks for it: remove the line")
    lines = [f"{package}{'===' if package in _BUILDS else '=='}{version}" for package, version in versions.items()]
    lines += [line for line in exact.splitlines() if "==" in line]
    head = f"# Made by `python -m scripts.create_environment --lock {name}` from {name}.in.\n"
    durable.write_bytes(lock, (head + "\n".join(sorted(lines)) + "\n").encode())
    say(f"{lock}: {len(lines)} packages")


def _run(command: list[str]) -> None:
    code = subprocess.run(command).returncode
    if code:
        raise UserError(f"`{' '.join(command)}` failed with exit code {code}: see above")
