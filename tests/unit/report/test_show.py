"""What `show` finds and how it marks the supervised tokens."""

import io

import pytest
from rich.console import Console

from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Reject, Sample, write_rows
from scripts.lib.report.show import find_samples, heading, sample_files, show, spans


class Letters:
    """Stands in for a target: id n is the n-th letter. Only `decode` matters here."""

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)


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
