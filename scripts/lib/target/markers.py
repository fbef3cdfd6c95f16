"""The tokens around thoughts and tool calls, learned from what a template renders: no list knows the next family's.

For example, Gemma 4 writes `<|channel>thought\\n...<channel|>` and `<|tool_call>call:f{}<tool_call|>`, which its template
shows where an answer calls a tool; Skywork's models write `<think>` as ordinary text, which their generation prompt
ends with.
"""

import re

from scripts.lib.core.records import Message
from scripts.lib.target.model import Target
from scripts.lib.target.probes import ASK, CALL, CONTENT, NAME, RESULT, THOUGHT, render, shown_thoughts
from scripts.lib.target.thoughts import MARK, Tags, mirrored, name_of, named_as_thought

_SPLIT = re.compile(r"""split\(\s*['"]([^'"]+)['"]""")


def thought_tags(target: Target) -> Tags | None:
    """The texts of the tags around a thought; None when the template tells of none (its model may think all the same)."""
    if target.harmony is not None:
        return None
    return _rendered_tags(target) or _split_tags(target.template) or _prompted_tags(target)


def _rendered_tags(target: Target) -> Tags | None:
    """The marks on both sides of a thought that the template renders."""
    plain = render(target, [ASK, Message("assistant", CONTENT)]) or ""
    header = _mark_before(plain, CONTENT)
    for rendered in shown_thoughts(target):
        opening = _mark_before(rendered, THOUGHT)
        closing = re.match(rf"\s*({MARK})", rendered[rendered.find(THOUGHT) + len(THOUGHT) :])
        if opening and closing and opening != header and target.structural_texts.get(closing[1]) not in target.eos_ids:
            return opening, closing[1]
    return None


def _mark_before(text: str, word: str) -> str | None:
    """The mark that a word follows, with no more than one other word in between: `<|channel>thought\\n`."""
    before, found, _ = text.partition(word)
    match = re.search(rf"({MARK})\s*\w*:?\s*\Z", before) if found else None
    return match[1] if match else None


def _prompted_tags(target: Target) -> Tags | None:
    """The tag that a generation prompt ends with, and the one that belongs to it: `<think>`, or a closed pair."""
    prompt = (render(target, [ASK], True) or "").rpartition(ASK.content)[2]
    marks = re.findall(rf"({MARK})\s*", prompt) if re.search(rf"{MARK}\s*\Z", prompt) else []
    # The header of a turn ends with marks, too.
    if len(marks) > 1 and named_as_thought(marks[-2]) and mirrored(marks[-2], marks[-1:]):
        return marks[-2], marks[-1]
    if not marks or name_of(marks[-1])[1] or not named_as_thought(marks[-1]):
        return None
    opening = marks[-1]
    tokens = [text for text in target.structural_texts if ("|" in text) == ("|" in opening)]
    closing = mirrored(opening, [*re.findall(MARK, target.template), *tokens])
    return opening, closing or f"{opening[0]}/{opening[1:]}"


def _split_tags(template: str) -> Tags | None:
    """The pair at whose end a template cuts an answer, to leave its thought out: `content.split('</think>')[-1]`."""
    marks = re.findall(MARK, template)
    for closing in _SPLIT.findall(template):
        if re.fullmatch(MARK, closing) and name_of(closing)[1] and "tool" not in closing:
            opening = next((mark for mark in marks if name_of(mark) == (name_of(closing)[0], False)), None)
            if opening:
                return opening, closing
    return None


def tool_openers(target: Target) -> set[int]:
    """Ids of the tokens that stand before a call's name, and in no conversation without calls."""
    if target.harmony is not None:
        return set()
    result = Message("tool", RESULT, name=NAME, tool_call_id=f"functions.{NAME}:0")
    plain = render(target, [ASK, Message("assistant", CONTENT, THOUGHT), ASK], True) or ""
    for content in ("", CONTENT):
        call = Message("assistant", content, None, CALL)
        rendered = render(target, [ASK, call, result], True) or render(target, [ASK, call]) or ""
        if NAME in rendered:
            return _new_tokens(target, rendered[: rendered.index(NAME)], plain)
    return set()


def _new_tokens(target: Target, text: str, plain: str) -> set[int]:
    known = {*target.encode(plain), *target.eos_ids, target.bos_id, target.think_open_id, target.think_close_id}
    return {token for token in target.encode(text) if token in target.structural_ids and token not in known}
