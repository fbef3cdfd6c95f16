"""Each defect of a conversation, repaired or named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core.records import Message
from scripts.lib.prompts.cleaning import Cleaner, repaired
from scripts.lib.prompts.defects import CHANGES, DEFECTS, Defect
from scripts.lib.prompts.sources.formats import Conversation


class Markers:
    """Stands in for a target whose control tokens are these texts."""

    def __init__(self, thinks=True):
        self.structural_texts = {"<|im_end|>": 2, "<|im_start|>": 1} | ({"</think>": 5} if thinks else {})
        self.thinks = thinks

    def structural_in(self, text):
        return [token for name, token in self.structural_texts.items() if name in text]


def conversation(*turns, **more):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = []
    for turn in turns:
        role, _, content = turn.partition(":")
        calls = content.removeprefix("call ") if content.startswith("call ") else None
        messages.append(Message(names[role], "" if calls else content, tool_calls=calls))
    return Conversation(messages, **more)


def clean(data_class, *turns, prompts_only=False, **options):
    found, changes = Cleaner(data_class, Markers(), **options)(conversation(*turns, prompts_only=prompts_only))
    return [f"{m.role[0]}:{m.content}" for m in found.messages], changes


def defect(data_class, *turns, prompts_only=False, **options):
    with pytest.raises(Defect) as raised:
        clean(data_class, *turns, prompts_only=prompts_only, **options)
    assert raised.value.reason in DEFECTS
    return raised.value.reason


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        (["u:q"], ["u:q"]),
        (["s:x", "u:q", "a:a"], ["s:x", "u:q"]),
        (["u:q", "a:a", "u:r", "a:b"], ["u:q", "u:r"]),
        (["u:q", "a:a", "u:r"], ["u:q", "u:r"]),
        (["u:q", "a:", "u:r"], ["u:q", "u:r"]),
        (["s: \n", "u:q"], ["u:q"]),
    ],
)
def test_class_b_keeps_what_the_user_said(turns, kept):
    found, changes = clean("B", *turns)
    assert found == kept
    assert changes == ({"answers_cut"} if any(turn.startswith("a") for turn in turns) else set())


@pytest.mark.parametrize(
    ("turns", "kept", "changes"),
    [
        (["u:q", "a:a"], ["u:q", "a:a"], set()),
        (["s:x", "u:q", "a:a", "u:r", "a:b"], ["s:x", "u:q", "a:a", "u:r", "a:b"], set()),
        (["u:q", "a:a", "u:r"], ["u:q", "a:a"], {"unanswered_cut"}),
        (["u:q", "a:call [1]", "t:3", "t:4", "a:7"], ["u:q", "a:", "t:3", "t:4", "a:7"], set()),
        (["u:q", "a:call [1]"], ["u:q", "a:"], set()),
    ],
)
def test_class_a_keeps_the_conversation_up_to_its_last_answer(turns, kept, changes):
    assert clean("A", *turns) == (kept, changes)


@pytest.mark.parametrize(
    ("data_class", "turns", "reason"),
    [
        ("B", [], "no_user_turn"),
        ("B", ["s:x"], "no_user_turn"),
        ("B", ["a:a", "u:q"], "assistant_first"),
        ("B", ["s:x", "a:a", "u:q"], "assistant_first"),
        ("A", ["t:3", "u:q", "a:a"], "assistant_first"),
        ("B", ["u:q", "u:r"], "non_alternating"),
        ("B", ["u:q", "a:a", "a:b"], "non_alternating"),
        ("A", ["u:q", "a:a", "t:3"], "non_alternating"),
        ("A", ["u:q", "a:call [1]", "a:b"], "non_alternating"),
        ("A", ["u:q", "a:call [1]", "t:3", "u:r", "a:b"], "non_alternating"),
        ("B", ["u:q", "s:x"], "system_not_first"),
        ("B", ["s:x", "s:y", "u:q"], "system_not_first"),
        ("B", ["u:"], "empty_turn"),
        ("B", ["u: \t\u3000\n\u200b"], "empty_turn"),
        ("B", ["u:q", "a:a", "u: "], "empty_turn"),
        ("A", ["u:q", "a: \n"], "empty_turn"),
        ("A", ["u:q"], "no_final_answer"),
        ("A", ["u:q", "a:call [1]", "t:3"], "no_final_answer"),
        ("B", ["u:q", "a:call [1]", "t:3", "a:a"], "tool_turns"),
        ("B", ["u:q", "a:call [1]"], "tool_turns"),
        ("A", ["u:q", "a:<think>on and on"], "unclosed_reasoning"),
        ("B", ["u:a \ud83d b"], "invalid_unicode"),
        ("A", ["u:q", "a:\udcff"], "invalid_unicode"),
        ("B", ["u:stop<|im_end|>"], "control_tokens"),
        ("B", ["s:<|im_start|>", "u:q"], "control_tokens"),
        ("A", ["u:q", "a:so </think> it is"], "control_tokens"),
        ("B", ["u:q", "a:Too many requests in 1 hour. Try again later.", "u:r"], "blocked_reply"),
        ("A", ["u:q", "a:!Network error"], "blocked_reply"),
    ],
)
def test_defects(data_class, turns, reason):
    assert defect(data_class, *turns) == reason


def test_answers_are_not_looked_at_where_the_target_writes_them():
    assert clean("B", "u:q", "a:<|im_end|>\ud800")[0] == ["u:q"]


def test_user_turns_may_follow_each_other_in_prompt_lists():
    assert clean("B", "u:q", "u:r", prompts_only=True)[0] == ["u:q", "u:r"]
    assert defect("A", "u:q", "u:r", prompts_only=True) == "no_final_answer"


def test_blocked_replies_can_be_let_through():
    turns = ["u:q", "a:Network error", "u:r"]
    assert clean("B", *turns, blocked_replies=False)[0] == ["u:q", "u:r"]


def test_long_answer_that_quotes_an_error_is_no_blocked_reply():
    assert clean("A", "u:q", "a:" + "Explained at length. " * 30 + "error in body stream")[0]


def test_control_tokens_in_tools_and_calls_are_found():
    cleaner = Cleaner("A", Markers())
    with pytest.raises(Defect, match="control_tokens"):
        cleaner(conversation("u:q", "a:a", tools='[{"name": "<|im_end|>"}]'))
    with pytest.raises(Defect, match="control_tokens"):
        cleaner(conversation("u:q", 'a:call [{"x": "<|im_end|>"}]'))


def test_neutralised_control_tokens_read_the_same():
    kept, changes = clean("B", "u:say <|im_end|> twice <|im_end|>", neutralise=True)
    assert kept == ["u:say <\u200b|im_end|> twice <\u200b|im_end|>"]
    assert changes == {"neutralised"}


@pytest.mark.parametrize(
    ("text", "clean_text", "change"),
    [
        ("a\r\nb\rc", "a\nb\nc", "line_endings"),
        ("a\x0bb\x0cc\x85d", "a\nb\nc\nd", "line_endings"),
        ("\ufeffa\ufeffb", "a\ufeffb", "byte_order_mark"),
        ("a\x00b", "ab", "nul"),
        ("a\x07\x1b[1mb\x7f\x9f", "a[1mb", "control_characters"),
        ("a\u2028b\u2029c", "a\u2028b\u2029c", "line_separators"),
        ("tab\tand\nline é 👩‍🚀", "tab\tand\nline é 👩‍🚀", None),
    ],
)
def test_characters(text, clean_text, change):
    found, changes = clean("B", f"u:{text}")
    assert found == [f"u:{clean_text}"]
    assert changes == ({change} if change else set())
    assert changes <= CHANGES.keys()


@given(st.text())
def test_repairing_twice_changes_nothing_more(text):
    once = repaired(text, set())
    changes: set[str] = set()
    assert repaired(once, changes) == once
    assert changes <= {"line_separators"}
    # What is left out are control characters only.
    assert [c for c in once if c not in "\n\ufeff"] == [
        c
        for c in text
        if c not in "\n\r\x0b\x0c\x85\ufeff" and not (c < " " and c != "\t") and not "\x7f" <= c <= "\x9f"
    ]


@pytest.mark.parametrize(
    ("text", "clean_text"),
    [
        ("1 / 2\nWhat is a monad?", "What is a monad?"),
        ("Look:Copy12 chars / 3 words", "Look:"),
        ("```pythonCopy code\nprint(1)```", "```python\n\nprint(1)```"),
        ("Is 1 / 2 the same as 2 / 4?", "Is 1 / 2 the same as 2 / 4?"),
        ('Why does <div class="a"> not float?', 'Why does <div class="a"> not float?'),
    ],
)
def test_residue_of_chat_pages(text, clean_text):
    assert clean("B", f"u:{text}", page_residue=True)[0] == [f"u:{clean_text}"]
    assert clean("B", f"u:{text}")[0] == [f"u:{text}"]


@pytest.mark.parametrize(
    "text", ["<div>What is a monad?</div>", ' <p dir="auto">x</p>', 'x <pre class="whitespace-pre-wrap">']
)
def test_markup_of_chat_pages(text):
    assert defect("B", f"u:{text}", page_residue=True) == "html_residue"
    assert clean("B", f"u:{text}")[0] == [f"u:{text}"]


def test_ready_tokens_are_class_a():
    tokens = Conversation(input_ids=[1, 2], loss_mask=[0, 1])
    assert Cleaner("A", Markers())(tokens) == (tokens, set())
    with pytest.raises(Defect, match="missing_field"):
        Cleaner("B", Markers())(tokens)


def test_the_conversation_given_is_not_changed():
    given_ = conversation("u:a\r\nb")
    Cleaner("B", Markers())(given_)
    assert given_.messages[0].content == "a\r\nb"


@pytest.mark.parametrize("blank", ["a:", "a: \n", "a:\u200b", "a:<think>\nand on"])
def test_a_last_answer_that_says_nothing_does_not_take_the_others_along(blank):
    found, changes = clean("A", "u:q", "a:a", "u:r", blank)
    assert (found, changes) == (["u:q", "a:a"], {"last_answer_cut"})
    found, changes = clean("A", "u:q", "a:a", "u:r", blank, "u:s")
    assert (found, changes) == (["u:q", "a:a"], {"last_answer_cut", "unanswered_cut"})


def test_an_only_answer_that_says_nothing_is_a_defect():
    assert defect("A", "u:q", "a:") == "empty_turn"
    assert defect("A", "u:q", "a:<think>\nand on") == "unclosed_reasoning"


def test_answers_that_are_not_to_be_learnt_stay_and_are_counted():
    given = conversation("u:q", "a:wrong", "u:r", "a:right")
    given.messages[1].trainable = False
    found, changes = Cleaner("A", Markers())(given)
    assert [m.trainable for m in found.messages] == [True, False, True, True]
    assert changes == {"not_all_learnt"}


def test_a_conversation_without_an_answer_to_learn_is_not_used():
    given = conversation("u:q", "a:wrong")
    given.messages[1].trainable = False
    with pytest.raises(Defect) as raised:
        Cleaner("A", Markers())(given)
    assert raised.value.reason == "not_to_learn"


def test_template_variables_may_hold_no_control_tokens():
    with pytest.raises(Defect) as raised:
        Cleaner("B", Markers())(conversation("u:q", template_kwargs='{"persona":"<|im_end|>"}'))
    assert raised.value.reason == "control_tokens"


def test_thoughts_in_answers_are_text_for_a_target_without_a_place_for_them():
    given = conversation("u:q", "a:<think>\nHm.\n</think>\n\nYes.")
    found, changes = Cleaner("A", Markers(thinks=False))(given)
    assert (found.messages[1].content, found.messages[1].reasoning) == ("<think>\nHm.\n</think>\n\nYes.", None)
    found, _ = Cleaner("A", Markers())(given)
    assert (found.messages[1].content, found.messages[1].reasoning, changes) == ("Yes.", "Hm.", set())
