"""Rows of Parquet and Arrow files."""

import pyarrow as pa
import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources import arrow_rows
from tests.raw_rows import arrow, parquet, read


def test_parquet_and_both_arrow_formats(monkeypatch):
    monkeypatch.setattr(arrow_rows, "BATCH_ROWS", 2)
    expected = [{"messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(5)]
    table = pa.Table.from_pylist(expected)
    for name, data in [
        ("a.parquet", parquet(table)),
        ("a.arrow", arrow(table, pa.ipc.new_stream)),
        ("a.arrow", arrow(table, pa.ipc.new_file)),
    ]:
        assert [(row.where, row.value) for row in read(name, data)] == [
            (f"{name}:{n + 1}", value) for n, value in enumerate(expected)
        ]


def test_text_of_parquet_that_is_not_utf8_is_one_bad_row():
    column = pa.array([b"good", b"b\xffd", b"fine"]).view(pa.string())
    good, bad, fine = read("a.parquet", parquet(pa.table({"prompt": column})))
    assert (good.value, fine.value) == ({"prompt": "good"}, {"prompt": "fine"})
    assert (bad.where, bad.defect.reason) == ("a.parquet:2", "invalid_unicode")


@pytest.mark.parametrize(("name", "data"), [("a.parquet", b"PAR1 nothing PAR1"), ("a.arrow", b"ARROW1 nothing")])
def test_broken_columnar_file_stops_with_its_name(name, data):
    with pytest.raises(UserError, match=rf"{name}: not a readable"):
        read(name, data)


def test_two_columns_of_one_name_stop():
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(UserError, match=r"a\.arrow: two columns have the same name"):
        read("a.arrow", arrow(table, pa.ipc.new_stream))


def test_a_cell_that_cannot_be_read_is_one_bad_row():
    texts = pa.array(['{"a": 1}', "{broken", "null"])
    table = pa.table({"prompt": ["x", "y", "z"], "extra": pa.ExtensionArray.from_storage(pa.json_(), texts)})
    good, bad, null = read("a.parquet", parquet(table))
    assert (good.value, null.value) == ({"prompt": "x", "extra": {"a": 1}}, {"prompt": "z", "extra": None})
    assert (bad.where, bad.defect.reason) == ("a.parquet:2", "broken_json")


def test_a_file_without_rows_says_so_itself():
    """Spark writes such parts."""
    assert read("a.parquet", parquet(pa.table({"prompt": pa.array([], pa.string())}))) == []
