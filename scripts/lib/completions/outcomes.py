"""What became of an answer: the rules that turn an engine's answer into an outcome.

Pure functions on ids. Text never decides: a control token and the same characters typed by the model
differ only in their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.lib.engines.base import Answer
from scripts.lib.target.output import Output

# A tail counts as degenerate when a pattern of at most this many ids comes at least this many times.
# Kimi-K2 issue 70, Kimi-K2.5 issue 46 (n-gram loops up to the limit), vllm issue 13035 (one id).
MAX_PERIOD = 64
MIN_REPEATS = 16


@dataclass(slots=True)
class Verdict:
    """The outcome of one turn. `again`: worth asking once more with another seed."""

    outcome: str
    reason: str | None = None
    flags: list[str] = field(default_factory=list)
    again: bool = False


def repeating_tail(
    ids: Sequence[int], max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS
) -> tuple[int, int] | None:
    """(period, repeats) of the pattern that `ids` end with, when it comes at least `min_repeats` times.

    The shortest such period. Give the ids without the stop token. Cost: a few comparisons per place where the
    last id came before.
    """
    length = len(ids)
    backwards = list(ids[-2 : -2 - max_period : -1])
    period = 0
    while True:
        try:
            period = backwards.index(ids[-1], period) + 1
        except (ValueError, IndexError):
            return None
        needed = period * (min_repeats - 1)  # matches of an id with the one a period earlier
        if needed + period > length:
            return None
        matches = 0
        position = length - 1
        while position >= period and ids[position] == ids[position - period]:
            matches += 1
            position -= 1
        if matches >= needed:
            return period, matches // period + 1


def judge(answer: Answer, ids: Sequence[int], output: Output, tools_given: bool, eos_ids: frozenset[int]) -> Verdict:
    """The outcome of an answer whose sampled ids are `ids` (the stop token included).

    A loop that ran into max_tokens is `repetition`; a loop that the model left by itself is flagged
    and left to validation.
    """
    flags = list(answer.flags)
    if answer.finish_reason == "content_filter":
        return Verdict("content_filter", "the provider filtered the answer", flags, again=True)
    if not tools_given and (output.tool_ids_seen or answer.finish_reason == "tool_calls"):
        return Verdict("unexpected_tool_call", "the answer calls a tool though none were given", flags)
    end = len(ids)
    while end and ids[end - 1] in eos_ids:
        end -= 1
    if not end or not (output.speaks or output.thinks or output.tool_ids_seen):
        return Verdict("empty", "no tokens but the stop token" if not end else "nothing but blanks", flags, again=True)
    tail = repeating_tail(ids[:end])
    if tail:
        if answer.finish_reason == "length":
            return Verdict("repetition", f"the last {tail[0] * tail[1]} ids repeat a pattern of {tail[0]}", flags)
        flags.append("repeating_tail")
    if answer.finish_reason == "length":
        flags.append("truncated")
        if not output.reasoning_closed:
            return Verdict("reasoning_only", "the thought reached max_tokens", flags)
        return Verdict("length", "the answer reached max_tokens", flags)
    if output.has_reasoning and (not output.reasoning_closed or not output.speaks) and not output.tool_ids_seen:
        why = "the thought never closed" if not output.reasoning_closed else "nothing follows the thought"
        return Verdict("reasoning_only", why, flags)
    return Verdict("ok", None, flags)
