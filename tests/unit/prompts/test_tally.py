"""What is counted about rows beside their reasons: columns that nobody reads, and how answers begin."""

from scripts.lib.core.records import Message
from scripts.lib.prompts.sources.formats import Conversation
from scripts.lib.prompts.tally import Tally, summary

PROVENANCE = {"sources": [], "settings": {}}


def answered(*texts):
    return Conversation([Message("user", "q"), *(Message("assistant", text) for text in texts)])


def report(tally):
    return tally.report("chat", "A", [tally.kept], PROVENANCE)


def test_unused_columns_the_longest_first():
    tally = Tally(rows=3)
    for unused in ({"context": 900, "lang": 2}, {"lang": 2}, {"lang": 2}):
        tally.take(answered(), (), unused)
        tally.keep(5)
    found = report(tally)
    assert list(found["unused_columns"].items()) == [
        ("context", {"rows": 1, "characters": 900}),
        ("lang", {"rows": 3, "characters": 6}),
    ]
    assert summary(found) == (
        "chat: 3 rows, 3 kept; unused columns: context 1, lang 3; 15 prompt tokens, the longest has 5"
    )


def test_more_columns_than_a_line_holds_are_counted():
    tally = Tally(rows=1)
    tally.take(answered(), (), {f"c{number}": 10 - number for number in range(9)})
    tally.keep(1)
    assert "unused columns: c0 1, c1 1, c2 1, c3 1, c4 1, c5 1 and 3 more;" in summary(report(tally))


def test_how_answers_begin():
    tally = Tally(rows=40)
    for number in range(40):
        text = "\n\nSure, 4." if number < 30 else "<answer>4" if number < 36 else f"No{number}"
        tally.take(answered(text, text), (), {})
        tally.keep(1)
    found = report(tally)
    assert (found["answered"], found["answers_begin_with"]) == (40, {"\n\n": 30, "<answer>": 6})
    assert "; answers begin with '\\n\\n' 30 of 40, '<answer>' 6 of 40;" in summary(found)


def test_common_words_are_in_the_report_and_not_in_the_line():
    tally = Tally(rows=4)
    for _ in range(4):
        tally.take(answered("Sure, 4."), (), {})
        tally.keep(1)
    assert report(tally)["answers_begin_with"] == {"Sure,": 4}
    assert "begin" not in summary(report(tally))


def test_class_b_has_no_answers_to_begin():
    tally = Tally(rows=1)
    tally.take(answered(), {"answers_cut"}, {})
    tally.keep(1)
    assert (report(tally)["answers_begin_with"], tally.changed) == ({}, {"answers_cut": 1})
