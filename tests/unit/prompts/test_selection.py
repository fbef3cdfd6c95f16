"""Identity, order, duplicates and evaluation sets, without files."""

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core.records import Message
from scripts.lib.prompts.selection import (
    Decontamination,
    NearDuplicates,
    normalised,
    prompt_id,
    prompt_key,
    seeded_order,
    shard_of,
    words,
)
from scripts.lib.prompts.sources.formats import Conversation


def asks(*texts, system=None, **more):
    first = [Message("system", system)] if system else []
    return Conversation([*first, *(Message("user", text) for text in texts)], **more)


@pytest.mark.parametrize(
    ("one", "other"),
    [("What is  TCP?", "what is\nTCP? "), ("cafe\u0301", "café"), ("A\tb", "a b")],
)
def test_keys_overlook_case_spacing_and_composition(one, other):
    assert prompt_key(asks(one)) == prompt_key(asks(other))


@pytest.mark.parametrize(
    "other",
    [
        asks("x2 = 4?"),
        asks("x² = 4", "why?"),
        asks("x² = 4?", system="Answer in French."),
        asks("x² = 4?", tools='[{"type":"function"}]'),
        Conversation([Message("user", "x"), Message("user", "² = 4?")]),
        Conversation(input_ids=[1], loss_mask=[1]),
    ],
)
def test_keys_tell_questions_apart(other):
    assert prompt_key(asks("x² = 4?")) != prompt_key(other)


def test_keys_overlook_answers():
    answered = Conversation([Message("user", "q"), Message("assistant", "a")])
    assert prompt_key(answered) == prompt_key(asks("q"))


def test_id_depends_on_dataset_own_id_content_and_count():
    ids = {
        prompt_id("d", asks("q")),
        prompt_id("e", asks("q")),
        prompt_id("d", asks("q", row_id="7")),
        prompt_id("d", asks("q ")),
        prompt_id("d", asks("q", system="s")),
        prompt_id("d", asks("q"), 1),
        prompt_id("d", asks("q"), 2),
        prompt_id("d", Conversation(input_ids=[1, 2], loss_mask=[0, 1])),
        prompt_id("d", Conversation(input_ids=[1, 2], loss_mask=[1, 1])),
    }
    assert len(ids) == 9
    assert all(len(own_id) == 32 and int(own_id, 16) >= 0 for own_id in ids)


def test_ids_never_change():
    """A new version must find yesterday's prompts: these were recorded once."""
    assert prompt_id("d", asks("What is TCP?", row_id="7")) == "81a3b837c2a071a10201dc972f8d3590"
    assert prompt_key(asks("What is TCP?")).hex() == "51120672563fdd7f3d42ead03999f1bf"
    assert seeded_order(0, "81a3b837c2a071a10201dc972f8d3590").hex() == "1ac198c96d4da669"


@given(st.text(alphabet="0123456789abcdef", min_size=32, max_size=32), st.integers(1, 1000))
def test_shard_is_in_range(own_id, shards):
    assert 0 <= shard_of(own_id, shards) < shards


def test_seeds_make_other_orders():
    ids = [prompt_id("d", asks(str(n))) for n in range(50)]
    one, again, other = (sorted(ids, key=lambda own_id: seeded_order(seed, own_id)) for seed in (1, 1, 2))
    assert one == again != other


def test_words_of_languages_without_spaces():
    assert words('Wie heißt "das", 東京?') == ["wie", "heisst", "das", "東", "京"]
    assert normalised(" Straße\n") == "strasse"


QUESTION = "A farmer sells sixteen eggs each morning at two dollars and keeps three for her own breakfast. How much?"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (QUESTION, True),
        ("Solve this: " + QUESTION.upper().replace(",", "") + " Think step by step.", True),
        ("Two unrelated first lines.\n" + " ".join(QUESTION.split()[:13]), True),
        (" ".join(QUESTION.split()[:12]), False),
        ("A farmer buys sixteen hens each morning at ten dollars and gives three to her own sister. How much?", False),
        ("Sort a list!", True),
        ("Sort a list of lists", False),
    ],
)
def test_evaluation_prompts_are_found(prompt, found):
    assert Decontamination([QUESTION, "sort a LIST"]).matches(["Hello.", prompt]) is found


def test_size_of_the_ngram_counts():
    assert Decontamination([QUESTION], ngram=5).matches(["farmer sells sixteen eggs each"])


def test_near_duplicates():
    index = NearDuplicates(0.7, sqlite3.connect(":memory:"))
    text = "Write a function that takes a list of integers and returns the longest increasing run in it, please."
    assert index.add_or_find("one", [text]) is None
    assert index.add_or_find("two", [text.replace("please", "thanks")]) == "one"
    assert index.add_or_find("three", ["Explain how a suspension bridge carries its load to the towers."]) is None
    # A prompt that was found to be a duplicate is not a reference for others.
    assert index.add_or_find("four", [text.replace("Write", "Draft")]) == "one"
    assert index.add_or_find("five", ["?"]) is None
    assert index.add_or_find("six", ["?"]) == "five"
