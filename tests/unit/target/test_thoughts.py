"""Thoughts in text: where they stand first, and nowhere else."""

import pytest

from scripts.lib.target.thoughts import (
    UnclosedThought,
    looks_like_thought,
    mirrored,
    name_of,
    split,
    split_anyhow,
    split_prefilled,
)

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\nHm.\n</think>\n\n4.", ("Hm.", "4.")),
        ("\n <think>Hm.</think>4. </think>", ("Hm.", "4. </think>")),
        ("[THINK]Hm.[/THINK]4.", ("Hm.", "4.")),
        ("4.", None),
        ("Here is my take.<think>Hm.</think>4.", None),  # langchain-nvidia pull request 345
        ("Write <think>like this</think> in XML.", None),  # unsloth pull request 9107
    ],
)
def test_only_a_thought_that_stands_first_is_one(text: str, found: tuple[str, str] | None):
    assert split(text) == found
    assert split_prefilled(text, THINK) == (found if "[THINK]" not in text else None)
    assert split_anyhow(text, ("<x>", "</x>")) == found


def test_the_opening_tag_may_have_been_the_prompts():
    assert split_prefilled("Hm.\n</think>\n\n4.", THINK) == ("Hm.", "4.")


def test_a_thought_that_never_closes():
    with pytest.raises(UnclosedThought, match="<think> without </think>"):
        split("<think>Hm, let me")
    assert split_anyhow("<think>Hm, let me", THINK) is None
    assert looks_like_thought("<think>Hm, let me")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|channel>", "<channel|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<start_working_out>", "<end_working_out>"),
        ("<seed:think>", "</seed:think>"),
        ("◁think▷", "◁/think▷"),
    ],
)
def test_marks_that_belong_together(opening: str, closing: str):
    assert mirrored(opening, ["</answer>", "<tool|>", opening, closing]) == closing
    assert (name_of(opening)[1], name_of(closing)[1]) == (False, True)
