"""Rows of tables, whatever separates their cells."""

import csv
import io

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources import table_rows
from tests.raw_rows import read, values


def test_csv_counts_lines_not_records():
    data = '\ufeffquestion,answer\r\n"two\nlines, ""quoted""",x\r\n\r\nlast,y\r\n'.encode()
    assert [(row.where, row.value) for row in read("a.csv", data)] == [
        ("a.csv:2", {"question": 'two\nlines, "quoted"', "answer": "x"}),
        ("a.csv:5", {"question": "last", "answer": "y"}),
    ]


def test_csv_row_that_does_not_fit_is_one_bad_row():
    first, second, third = read("a.csv", b"a,b\n1\n1,2,3\n1,2\n")
    assert first.defect.reason == second.defect.reason == "broken_row"
    assert third.value == {"a": "1", "b": "2"}


def test_csv_with_bytes_that_are_not_utf8_is_left_to_cleaning():
    assert values("a.csv", b"prompt\ncaf\xe9\n") == [{"prompt": "caf\udce9"}]


@pytest.mark.parametrize("data", [b'prompt\n"never closed\n', b"a,a\n1,2\n"])
def test_broken_table_stops_with_its_place(data):
    with pytest.raises(UserError, match=r"a\.csv:\d"):
        read("a.csv", data)


def test_tabs_of_a_tsv():
    assert values("a.tsv", b"prompt\tn\nwith, comma\t1\n") == [{"prompt": "with, comma", "n": "1"}]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_table_is_separated_by_what_its_header_is(separator, name):
    """Semicolons are what spreadsheets write where the comma is the decimal sign."""
    rows = [["Frage", "Antwort"], ["Wie groß, wie schwer?", "1,80 m; 75,5 kg"], ["Warum | wozu?", "Darum,\tdazu"]]
    sink = io.StringIO()
    csv.writer(sink, delimiter=separator).writerows(rows)
    assert values(name, sink.getvalue().encode()) == [dict(zip(rows[0], row)) for row in rows[1:]]


def test_a_few_bad_rows_do_not_change_the_separator():
    text = "prompt;answer\n" + "Was, bitte, ist das?;Das\n" * 9 + "no answer\n"
    rows = read("a.csv", text.encode())
    assert [row.value for row in rows[:9]] == [{"prompt": "Was, bitte, ist das?", "answer": "Das"}] * 9
    assert rows[9].defect.reason == "broken_row"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prompt\nWhy; and how; and when?\nAnd a | b?\n", ["Why; and how; and when?", "And a | b?"]),
        ("prompt,note;more\nWhy?,x;y\n", ["Why?"]),
        ("prompt,a\n\"one; two\",b\n\"three; four\",c\n", ["one; two", "three; four"]),
    ],
)  # fmt: skip
def test_commas_stay_where_they_fit(text, expected):
    assert [row["prompt"] for row in values("a.csv", text.encode())] == expected


def test_excels_own_first_line_names_the_separator():
    assert [(row.where, row.value) for row in read("a.csv", b"sep=;\r\nprompt;n\r\nWhy?;1\r\n")] == [
        ("a.csv:3", {"prompt": "Why?", "n": "1"})
    ]


def test_large_tables_are_judged_by_whole_rows(monkeypatch):
    monkeypatch.setattr(table_rows, "CHUNK_BYTES", 64)
    text = "prompt;n\n" + "".join(f"Question, number {n}?;{n}\n" for n in range(5000))
    assert values("a.csv", text.encode())[-1] == {"prompt": "Question, number 4999?", "n": "4999"}
