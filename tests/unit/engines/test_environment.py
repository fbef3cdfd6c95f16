"""Locks of server environments, resolved by the real pip from packages made here."""

import zipfile
from pathlib import Path

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.engines import environment


def wheel(folder: Path, name: str, *needs: str) -> None:
    """An empty package, version 1, that asks for others."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {other}" for other in needs)]
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}-1.dist-info/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}-1.dist-info/RECORD", "")


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel(tmp_path, "server", "web", "kernels")
    wheel(tmp_path, "web")
    wheel(tmp_path, "kernels", "driver")
    wheel(tmp_path, "driver")
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def locked(envs: Path, text: str) -> list[str]:
    (envs / "x.in").write_text(text)
    environment.lock_environment("x", lambda line: None)
    return (envs / "x.txt").read_text().splitlines()[1:]


def test_lock_holds_all_that_is_asked_for(envs: Path) -> None:
    assert locked(envs, "# a server\nserver\n") == ["driver==1", "kernels==1", "server==1", "web==1"]


def test_lock_takes_some_as_they_are_and_leaves_others_out(envs: Path) -> None:
    assert locked(envs, "web\n# --no-deps: asks for a driver\nkernels==1\n") == ["kernels==1", "web==1"]
    assert locked(envs, "server\n# --without: no GPU\nkernels\ndriver\n") == ["server==1", "web==1"]


def test_a_lock_says_the_command_that_makes_it(envs: Path) -> None:
    locked(envs, "server\n# --without: no GPU\nkernels\ndriver\n")
    head = (envs / "x.txt").read_text().splitlines()[0]
    assert head == "# Made by `python -m scripts.create_environment --lock x` from x.in."


@pytest.mark.parametrize("name", environment.names())
def test_the_locks_of_the_project_say_it_too(name: str) -> None:
    head = (environment.ENVIRONMENTS / f"{name}.txt").read_text().splitlines()[0]
    assert head == f"# Made by `python -m scripts.create_environment --lock {name}` from {name}.in."
    assert (environment.ENVIRONMENTS / f"{name}.in").is_file()


def test_what_nothing_asks_for_cannot_be_left_out(envs: Path) -> None:
    with pytest.raises(UserError, match=r"x\.in: `kernels` is to be left out, but nothing asks for it"):
        locked(envs, "web\n# --without\nkernels\n")
