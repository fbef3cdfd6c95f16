"""What `show` finds and how it marks the supervised tokens."""

import io
import os
import re
import subprocess
import sys
from typing import ClassVar

import pytest
from rich.console import Console

from scripts import show as show_entry
from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Reject, Sample, write_rows
from scripts.lib.report.show import find_samples, heading, sample_files, show, spans
from scripts.lib.target.prepare import prepare_target


class Letters:
    """Stands in for a target: id n is the n-th letter, or one of a few texts. Only `decode` matters here."""

    vocab_size = 40
    others: ClassVar = {
        26: "\x1b]0;PWN\x07",
        27: "\x9b2J",
        28: "\u202edrawkcab",
        29: "[bold]",
        30: "[/INST]",
        31: "\r\x7f",
    }

    def decode(self, ids):
        return "".join(self.others.get(token) or chr(ord("a") + token) for token in ids)


def sample(name, dataset="d", ids=(0, 1, 2, 3), mask=(0, 0, 1, 1), kind=Sample, **more):
    return kind(name, name.split("/")[0], dataset, list(ids), list(mask), "engine", "ok", **more)


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "d" / "000.parquet", Sample, [sample("aa"), sample("ab", "e")], {})
    write_rows(tmp_path / "d" / "001.parquet", Sample, [sample("ba")], {})
    write_rows(
        tmp_path / "d" / "000.rejects.parquet", Reject, [sample("zz", kind=Reject, check="length", detail="9 > 8")], {}
    )
    return tmp_path


def test_spans_are_runs_of_equal_mask():
    assert list(spans(sample("a", ids=(5, 6, 7, 8), mask=(0, 1, 1, 0)))) == [(0, [5]), (1, [6, 7]), (0, [8])]


def test_selection(folder):
    def names(dataset=None, sample_id=None, skip=0, number=10):
        return [found.id for found in find_samples([folder], dataset, sample_id, skip, number)]

    assert names() == ["aa", "ab", "ba"]
    assert names(dataset="e") == ["ab"]
    assert names(sample_id="a") == ["aa", "ab"]
    assert names(skip=1, number=1) == ["ab"]


def test_rejects_are_shown_when_their_file_is_named(folder):
    (reject,) = find_samples([folder / "d" / "000.rejects.parquet"], None, None, 0, 5)
    assert "REJECTED by length: 9 > 8" in heading(reject)


def test_text_without_colours_has_marks(folder):
    out = io.StringIO()
    console = Console(file=out, color_system=None, soft_wrap=True, width=40)
    assert show(console, find_samples([folder], None, None, 0, 1), Letters(), ids=False) == 1
    assert "── aa · d · 4 tokens, 2 supervised · outcome ok · ids engine\n" in out.getvalue()
    assert "ab⟦cd⟧" in out.getvalue()


def test_token_table_names_each_token(folder):
    out = io.StringIO()
    show(Console(file=out, color_system=None), find_samples([folder], None, None, 0, 1), Letters(), ids=True)
    assert [line.split() for line in out.getvalue().splitlines()[2:]] == [
        ["0", "0", "0", "'a'"],
        ["1", "1", "0", "'b'"],
        ["2", "2", "1", "'c'"],
        ["3", "3", "1", "'d'"],
    ]


def test_wrong_paths_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        sample_files(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no Parquet files of samples"):
        sample_files(tmp_path)


def shown(samples, ids=False, **console):
    out = io.StringIO()
    show(Console(file=out, soft_wrap=True, width=80, **console), iter(samples), Letters(), ids)
    return out.getvalue()


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("colours", [{"color_system": None}, {"color_system": "truecolor", "force_terminal": True}])
def test_what_the_model_said_does_not_steer_the_terminal(ids, colours):
    text = shown([sample("aa", ids=(0, 26, 27, 28, 31, 1), mask=(0, 1, 1, 1, 1, 1))], ids, **colours)
    left = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours of our own
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", left)
    if not ids:
        assert "␛]0;PWN␇<U+009B>2J<U+202E>drawkcab␍␡b" in left.replace("⟦", "").replace("⟧", "")


def test_facts_about_a_sample_do_neither():
    odd = sample(
        "a\x1b[2J", dataset="d\nx", kind=Reject, check="\x07", detail="two\nlines\x1b]0;x\x07", flags=["\u202e"]
    )
    text = shown([odd], color_system=None)
    assert text.splitlines()[0] == (
        "── a␛[2J · d␊x · 4 tokens, 2 supervised · outcome ok · ids engine · flags <U+202E> · "
        "REJECTED by ␇: two␊lines␛]0;x␇"
    )


def test_tokens_that_look_like_markup_are_shown_as_they_are():
    rows = shown([sample("aa", ids=(29, 30), mask=(1, 1))], ids=True, color_system=None).splitlines()
    assert [row.split()[-1] for row in rows[2:]] == ["'[bold]'", "'[/INST]'"]


def test_rejects_with_ids_that_nobody_knows_are_shown():
    assert "a<id -100><id 40>b" in shown([sample("aa", ids=(0, -100, 40, 1), mask=(0, 0, 0, 0))], color_system=None)


def test_a_terminal_that_knows_few_characters(folder, tmp_path):
    settings = parse_config({"datasets": {"alpha": {"class": "B", "source": "x"}}}, "test")
    prepare_target(settings, tmp_path / "target")
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.show", str(folder / "d"), "--target", str(tmp_path / "target")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u27e6" in ended.stdout


@pytest.mark.parametrize("arguments", [["--skip", "-1"], ["-n", "-1"], ["-n", "0"], ["-n", "x"]])
def test_numbers_that_are_none(arguments, capsys):
    with pytest.raises(SystemExit):
        show_entry.main(arguments)
    assert "Traceback" not in capsys.readouterr().err


def test_nobody_is_told_to_delete_what_they_named(tmp_path):
    (tmp_path / "my.yaml").write_text("datasets: {}")
    with pytest.raises(UserError, match=r"my\.yaml: not a readable Parquet file .*: name one of the stages"):
        list(find_samples([tmp_path / "my.yaml"], None, None, 0, 1))
