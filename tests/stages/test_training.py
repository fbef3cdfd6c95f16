"""Stage 5 by its own command lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import backup_training, merge_training, restore_training, verify_training
from tests.corpora import bytes_of, shards, summary_of

ROOT = Path(__file__).resolve().parents[2]


class Commands:
    """The commands of stage 5 on one results folder, with the arguments that the rules give them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.training = folder / "results/training"
        self.validated = shards(folder / "results/validated")
        (folder / "results/validated/summary.json").write_text(json.dumps(summary_of(self.validated)))
        self.configure({})

    def configure(self, merge: dict):
        datasets = {name: {"class": "B", "source": "x"} for name in ("alpha", "beta")}
        (self.folder / "config.yaml").write_text(yaml.safe_dump({"datasets": datasets, "merge": merge}))

    def arguments(self, receipt: str) -> list[str]:
        state = self.folder / "results/state"
        config = ["--config", self.folder / "config.yaml", "--training", self.training]
        return [*map(str, config), "--receipt", str(state / receipt)]

    def merge(self) -> int:
        summary = self.folder / "results/validated/summary.json"
        validated = ["--validated", *map(str, self.validated), "--summary", str(summary)]
        return merge_training.main([*self.arguments("training.json"), *validated])

    def back_up(self) -> int:
        return backup_training.main([*self.arguments("backup.json"), *self.where()[2:]])

    def restore(self, *arguments: str) -> int:
        return restore_training.main([*self.where(), *arguments])

    def verify(self) -> int:
        return verify_training.main(self.where()[:2])

    def where(self) -> list[str]:
        return ["--training", str(self.training), "--backups", str(self.folder / "results/backups")]

    def receipt(self, name: str) -> dict:
        return json.loads((self.folder / "results/state" / name).read_text())


@pytest.fixture
def commands(tmp_path):
    return Commands(tmp_path)


def test_backup_merge_verify_restore(commands, capsys):
    assert commands.back_up() == 0
    assert commands.receipt("backup.json") == {"backup": None, "reason": "there was no corpus"}
    assert commands.merge() == 0
    first = commands.receipt("training.json")
    assert first["rows"] == 80
    before = bytes_of(commands.training)
    assert commands.back_up() == 0
    backup = commands.receipt("backup.json")["backup"]
    commands.configure({"seed": 1})
    assert commands.merge() == 0
    assert commands.receipt("training.json")["version"] != first["version"]
    assert commands.verify() == 0
    capsys.readouterr()
    assert commands.restore("--list") == 0
    assert capsys.readouterr().out == f"{backup['name']}  {backup['created']}  80 samples  {first['tokens']} tokens\n"
    assert commands.restore("--name", backup["name"]) == 0
    assert bytes_of(commands.training) == before


def test_damage_is_one_line_each_and_exit_code_1(commands, capsys):
    commands.merge()
    part = commands.training / "part-00000.parquet"
    part.unlink()
    capsys.readouterr()
    assert commands.verify() == 1
    printed = capsys.readouterr()
    assert printed.out == f"{part}: no such file or directory\n"
    assert printed.err.startswith(f"error: {commands.training}: 1 problems")


def test_a_receipt_appears_only_when_the_corpus_is_there(commands, capsys):
    commands.validated[0].write_bytes(b"junk")
    assert commands.merge() == 1
    assert "alpha/000.parquet: not a readable Parquet file" in capsys.readouterr().err
    assert not (commands.folder / "results/state/training.json").exists()


@pytest.mark.parametrize("name", ["merge_training", "backup_training", "restore_training", "verify_training"])
def test_help_explains_every_option(name):
    shown = subprocess.run(
        [sys.executable, "-m", f"scripts.{name}", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    options = [line.split() for line in shown.splitlines() if line.startswith("  --")]
    assert ["--training"] in [words[:1] for words in options]
    assert shown.count("\n") > 4
