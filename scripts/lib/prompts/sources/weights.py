"""What a source says about which of its answers are to be learnt, under the names of many trainers."""

from typing import Any

from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.fields import Columns

# OpenAI, Mistral, Fireworks, Together, SlimOrca: weight; LLaMA-Factory: loss_weight; axolotl: train, training;
# verl: trainable; ms-swift: loss; LoongForge: loss_mask.
TURN_KEYS = ("weight", "loss_weight", "train", "training", "trainable", "loss", "loss_mask")
_LISTS = ("loss_mask", "loss_weights", "turn_weights", "weights")
_ROW_KEYS = ("weight", "loss_weight", "sample_weight", "train", "trainable")
# TRL and ms-swift, LLaMA-Factory, HALOs; the others are what people call the same.
_OPINIONS = ("label", "kto_tag", "is_good", "is_chosen", "chosen", "desirable", "accepted")
_FALSE, _TRUE = ("0", "0.0", "false", "no"), ("1", "1.0", "true", "yes")


def learnt(turn: dict) -> tuple[bool, bool]:
    """(whether a turn is to be learnt, whether its weight is neither 0 nor 1).

    Raises Defect `turn_weights` for a weight that no mask can follow: of parts of a turn, or no number.
    """
    detail = turn.get("train_detail")
    if isinstance(detail, list) and any(isinstance(part, dict) and part.get("train") is False for part in detail):
        raise Defect("turn_weights", "`train_detail` leaves out a part of a turn")
    wanted, odd = True, False
    if turn.get("masked") is True:  # torchtune's word is the other way round
        wanted = False
    for key in TURN_KEYS:
        value = turn.get(key)
        if value is None:
            continue
        weight = _weight(value)
        if weight is None:
            raise Defect("turn_weights", f"`{key}` is {str(value)[:40]!r}")
        wanted = wanted and weight > 0
        odd = odd or weight not in (0, 1)
    return wanted, odd


def follow_list(columns: Columns, messages: list[Message]) -> None:
    """Follow a row's list of what is to be learnt, one entry for each turn or for each answer (LLaMA-Factory's PR 9630).

    Raises Defect `turn_weights` for a list that fits neither.
    """
    listed = next((value for name in _LISTS if isinstance(value := columns.look(name), list)), None)
    if listed is None:
        return
    answers = [message for message in messages if message.role == "assistant"]
    weighed = {len(answers): answers, len(messages): messages}.get(len(listed))
    wanted = [_weight(value) for value in listed]
    if weighed is None or None in wanted:
        raise Defect("turn_weights", f"a list of {len(listed)} for {len(messages)} turns")
    for message, weight in zip(weighed, wanted):
        message.trainable = message.trainable and (weight != 0 or message.role != "assistant")


def refuse_unlearnt(columns: Columns) -> None:
    """Refuse a row of class A whose answer people disliked, or whose weight is 0. Raises Defect."""
    for name in _OPINIONS:
        value = columns.look(name)
        if _is_no(value, numbers=columns.has("completion")):
            raise Defect("disliked", f"`{name}` is {value!r}")
    for name in _ROW_KEYS:
        value = columns.look(name)
        if _weight(value) == 0:
            raise Defect("not_to_learn", f"`{name}` is {value!r}")


def _is_no(value: Any, numbers: bool) -> bool:
    """Whether an opinion is a bad one. `numbers`: beside KTO's `completion` 0 is one; elsewhere it can be any label."""
    if isinstance(value, str):
        return value.strip().lower() == "false"
    return value is False or (numbers and isinstance(value, int) and value == 0)


def _weight(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    text = value.strip().lower() if isinstance(value, str) else ""
    return 0.0 if text in _FALSE else 1.0 if text in _TRUE else None
