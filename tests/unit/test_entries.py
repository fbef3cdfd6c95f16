"""All entries speak one dialect of the command line."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__")


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"scripts.{request.param}")


def test_help_shows_a_command_that_can_be_typed(entry: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        entry.main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m {entry.__name__} [-h]")
    assert entry.__doc__.strip() in text


def test_every_option_is_explained_and_says_what_it_takes(entry: ModuleType, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        entry.main(["--help"])
    options = re.split(r"\n(?=  \S)", capsys.readouterr().out.partition("options:\n")[2])
    for option in options:
        head, _, explained = option.strip().partition("  ")
        assert explained.strip() or "\n" in option.strip(), option
        # argparse's own fillers: CONFIG [CONFIG ...] for what takes a file.
        assert not re.search(r"--config CONFIG|--output OUTPUT|--target TARGET", head), option


def test_an_unknown_option_is_refused(entry: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        entry.main(["--no-such-option"])
    assert f"python -m {entry.__name__}: error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["show", "watch_progress"])
def test_before_a_run_people_are_told_that_nothing_has_run(name: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(f"scripts.{name}").main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: results/\S+: nothing has run yet: `snakemake --cores 8 merge_training` .*", line)
