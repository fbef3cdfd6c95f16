"""Which answers are to be learnt, in the words of OpenAI, axolotl, LLaMA-Factory, ms-swift, verl, torchtune."""

import pytest

from scripts.lib.config.model import Fields
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.formats import to_conversation
from scripts.lib.prompts.sources.weights import learnt


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ({}, (True, False)),
        ({"weight": None, "loss": None}, (True, False)),
        ({"weight": 1}, (True, False)),
        ({"weight": 0}, (False, False)),
        ({"loss_weight": 0.0}, (False, False)),
        ({"train": False}, (False, False)),
        ({"training": "false"}, (False, False)),
        ({"trainable": True}, (True, False)),
        ({"loss": False}, (False, False)),
        ({"loss_mask": "0"}, (False, False)),
        ({"masked": True}, (False, False)),
        ({"masked": False}, (True, False)),
        ({"weight": 0.5}, (True, True)),
        ({"weight": -1}, (False, True)),
        ({"weight": 1, "train": False}, (False, False)),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 4, "train": True}]}, (True, False)),
    ],
)
def test_weights(turn, found):
    assert learnt(turn) == found


@pytest.mark.parametrize("turn", [{"weight": "much"}, {"loss_mask": [0, 1]}, {"train_detail": [{"train": False}]}])
def test_weights_that_no_mask_can_follow(turn):
    with pytest.raises(Defect) as raised:
        learnt(turn)
    assert raised.value.reason == "turn_weights"


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}],
        [{"from": "human", "value": "q", "weight": None}, {"from": "gpt", "value": "a", "weight": 0.0}],
        [{"user": "q", "bot": "a", "loss": False}],
    ],
)
def test_messages_know_it(turns):
    assert [m.trainable for m in to_conversation({"messages": turns}, "auto", Fields()).messages] == [True, False]


def test_a_weight_of_the_users_turn_says_nothing():
    turns = [{"role": "user", "content": "q", "weight": 0}, {"role": "assistant", "content": "a"}]
    assert all(m.trainable for m in to_conversation({"messages": turns}, "auto", Fields()).messages)


def test_weights_between_are_counted():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]
    assert to_conversation({"messages": turns}, "auto", Fields()).changes == ["turn_weights_ignored"]


TURNS = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd")]


@pytest.mark.parametrize(
    ("listed", "learnt"),
    [([0, 0, 0, 1], [False, True]), ([False, True], [False, True]), ([1, 1, 1, 1], [True, True])],
)
def test_a_list_beside_the_turns_says_what_is_learnt(listed: list, learnt: list[bool]):
    """One entry a message, as LLaMA-Factory's pull request 9630 has it, or one an answer."""
    messages = to_conversation({"messages": TURNS, "loss_mask": listed}, "auto", Fields()).messages
    assert [message.trainable for message in messages if message.role == "assistant"] == learnt
    assert all(message.trainable for message in messages if message.role == "user")


def test_a_list_that_fits_no_turns_is_refused():
    with pytest.raises(Defect) as raised:
        to_conversation({"messages": TURNS, "loss_mask": [0, 1, 1]}, "auto", Fields())
    assert raised.value.reason == "turn_weights"
    assert to_conversation({"messages": TURNS, "loss_mask": [0, 1, 1]}, "auto", Fields(), answers=False).messages
