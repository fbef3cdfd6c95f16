"""Defects of conversations: repaired where the meaning is certain, otherwise a reason to leave the row out.

Class B keeps the system turn and the user's turns, whose answers the target writes anew. Class A keeps the whole
conversation up to the last answer. The defects of public sets are described in FastChat's `clean_sharegpt.py` and in
the issues of SpecForge (#216, #221) and speculators (#801, #907).
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Protocol

from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.formats import Conversation
from scripts.lib.prompts.sources.turns import split_thought

_SUSPICIOUS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile("\r\n?|[\x0b\x0c\x85]")
_CONTROL = re.compile("[\x01-\x08\x0e-\x1f\x7f-\x9f]")
_BLANK = re.compile("[\\s\u200b-\u200f\u2060\ufeff]*")

# What a chat page copies along with its text.
_PAGE_COUNTER = re.compile(r"^\s*\d+ / \d+\s*")
_COPY_COUNTER = re.compile(r"Copy\d+ chars / \d+ words")
_COPY_CODE = re.compile(r"(```[ \t]*)([\w+#.-]*?)Copy code")
# The page's own markup around a turn; people also ask about HTML, which is no residue.
_PAGE_MARKUP = re.compile(
    r'^\s*<(?:div|span|p)\b[^>]*>|class="[^"]*\b(?:markdown prose|whitespace-pre-wrap|flex-col|hljs)\b', re.IGNORECASE
)

# An answer that is one of these was written by the web page, not by the model. Long answers may quote them.
_BLOCKED = re.compile(
    r"too many requests in \d+ hour|error in body stream|^!?\s*request timed out|^!?\s*network error"
    r"|something went wrong\. if this issue persists|our systems are a bit busy|^!?\s*an error occurred\. (?:either|if)"
    r"|this content may violate our content policy|conversation not found",
    re.IGNORECASE,
)
_BLOCKED_LENGTH = 400

ZERO_WIDTH_SPACE = "\u200b"


class ControlTokens(Protocol):
    """What cleaning needs of the target (`scripts.lib.target.model.Target`)."""

    structural_texts: dict[str, int]

    @property
    def thinks(self) -> bool:
        """Whether a thought has a place of its own; what stands between tags is text otherwise."""
        ...

    def structural_in(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Cleaner:
    """Cleans conversations of one dataset.

    `neutralise` breaks control tokens up instead of leaving the row out; `page_residue` repairs what was copied off
    web pages.
    """

    data_class: str
    target: ControlTokens
    neutralise: bool = False
    blocked_replies: bool = True
    page_residue: bool = False

    def __call__(self, conversation: Conversation) -> tuple[Conversation, set[str]]:
        """(clean conversation, names of CHANGES made). Raises Defect."""
        changes: set[str] = set(conversation.changes)
        if conversation.input_ids is not None:
            if self.data_class == "B":
                raise Defect("missing_field", "class B needs texts, the row holds token ids")
            return conversation, changes
        messages = [dataclasses.replace(message) for message in conversation.messages]
        # An empty system turn says nothing.
        if messages and messages[0].role == "system" and _BLANK.fullmatch(messages[0].content):
            messages = messages[1:]
        if self.data_class == "A":
            self._split_thoughts(messages)
        messages = self._fitting_turns(messages, conversation.prompts_only, changes)
        for message in messages:
            message.content = self._text(message.content, changes)
            if message.reasoning is not None:
                message.reasoning = self._text(message.reasoning, changes)
            if _BLANK.fullmatch(message.content) and message.tool_calls is None:
                raise Defect("empty_turn", f"a turn of {message.role}")
            if message.tool_calls is not None:
                self._refuse_control_tokens(message.tool_calls)
        if conversation.tools is not None:
            self._refuse_control_tokens(conversation.tools)
        if conversation.template_kwargs is not None:
            self._refuse_control_tokens(conversation.template_kwargs)
        answers = [message for message in messages if message.role == "assistant"]
        if not all(message.trainable for message in answers):
            if not any(message.trainable for message in answers):
                raise Defect("not_to_learn", "no answer has a weight")
            changes.add("not_all_learnt")
        return dataclasses.replace(conversation, messages=messages, changes=[], unused={}), changes

    def _split_thoughts(self, messages: list[Message]) -> None:
        """Thoughts inside answers to their own place, where the target has one. Else they are text like any other.

        Of a last answer whose thought never closes nothing is left, if there are others.
        """
        answers = [message for message in messages if message.role == "assistant"]
        for message in answers:
            if not self.target.thinks and not self.target.structural_in(message.content):
                continue
            try:
                split_thought(message)
            except Defect:
                if message is not answers[-1] or len(answers) == 1:
                    raise
                message.content = ""

    def _fitting_turns(self, messages: list[Message], prompts_only: bool, changes: set[str]) -> list[Message]:
        """The turns that the class keeps, after checking who speaks when."""
        if self.data_class == "B" and any(m.role == "tool" or m.tool_calls is not None for m in messages):
            raise Defect("tool_turns")
        check_turns(messages, prompts_only)
        if self.blocked_replies and any(
            message.role == "assistant" and len(message.content) <= _BLOCKED_LENGTH and _BLOCKED.search(message.content)
            for message in messages
        ):
            raise Defect("blocked_reply")
        if self.data_class == "B":
            kept = [message for message in messages if message.role != "assistant"]
            if len(kept) < len(messages):
                changes.add("answers_cut")
            return kept
        return _up_to_last_answer(messages, changes)

    def _text(self, text: str, changes: set[str]) -> str:
        if _SUSPICIOUS.search(text):
            text = repaired(text, changes)
        if self.page_residue:
            text = self._without_residue(text, changes)
        if self.target.structural_in(text):
            if self.neutralise:
                text = self._neutralised(text)
                changes.add("neutralised")
            self._refuse_control_tokens(text)
        return text

    def _refuse_control_tokens(self, text: str) -> None:
        found = self.target.structural_in(text)
        if found:
            names = [name for name, token in self.target.structural_texts.items() if token in found]
            raise Defect("control_tokens", " ".join(sorted(names)) or f"ids {sorted(set(found))}")

    def _neutralised(self, text: str) -> str:
        # The longest first, so that no name is cut by a shorter one inside it.
        for name in sorted(self.target.structural_texts, key=len, reverse=True):
            text = text.replace(name, name[0] + ZERO_WIDTH_SPACE + name[1:])
        return text

    @staticmethod
    def _without_residue(text: str, changes: set[str]) -> str:
        if _PAGE_MARKUP.search(text):
            raise Defect("html_residue")
        clean = _COPY_CODE.sub(r"\1\2\n", _COPY_COUNTER.sub("", _PAGE_COUNTER.sub("", text)))
        if clean != text:
            changes.add("page_residue")
        return clean


def _up_to_last_answer(messages: list[Message], changes: set[str]) -> list[Message]:
    """The conversation without what follows its last answer that says something. Raises Defect `no_final_answer`."""
    while messages:
        last = messages[-1]
        if last.role == "user":
            messages = messages[:-1]
            changes.add("unanswered_cut")
        elif _says_nothing(last) and any(m.role == "assistant" for m in messages[:-1]) and messages[-2].role == "user":
            messages = messages[:-2]
            changes.add("last_answer_cut")
        else:
            break
    if not messages or messages[-1].role != "assistant":
        raise Defect("no_final_answer", "class A needs answers; is this a source of prompts, class B?")
    return messages


def _says_nothing(message: Message) -> bool:
    return message.role == "assistant" and message.tool_calls is None and bool(_BLANK.fullmatch(message.content))


def repaired(text: str, changes: set[str]) -> str:
    """The text without control characters, with LF line ends. Raises Defect `invalid_unicode`."""
    if surrogate := _SURROGATE.search(text):
        raise Defect("invalid_unicode", f"U+{ord(surrogate[0]):04X} at character {surrogate.start()}")

    def replace(pattern: re.Pattern | str, by: str, change: str) -> None:
        nonlocal text
        clean = re.sub(pattern, by, text)
        if clean != text:
            changes.add(change)
            text = clean

    replace("^\ufeff+", "", "byte_order_mark")
    replace(_LINE_END, "\n", "line_endings")
    replace("\x00", "", "nul")
    replace(_CONTROL, "", "control_characters")
    if "\u2028" in text or "\u2029" in text:
        changes.add("line_separators")
    return text


def check_turns(messages: Iterable[Message], prompts_only: bool = False) -> None:
    """Check who speaks when: system?, then user and assistant in turn, tools only after their call. Raises Defect.

    With `prompts_only`, user turns follow each other.
    """
    before = "start"
    users = 0
    for index, message in enumerate(messages):
        role = message.role
        if role == "system":
            if index:
                raise Defect("system_not_first")
            continue
        if before == "start" and role != "user":
            raise Defect("assistant_first", f"the first turn is the {role}'s")
        allowed = {
            "start": ("user",),
            "user": ("assistant", "user") if prompts_only else ("assistant",),
            "assistant": ("user",),
            "call": ("tool",),
            "tool": ("tool", "assistant"),
        }[before]
        if role not in allowed:
            raise Defect("non_alternating", f"{role} after {before}")
        users += role == "user"
        before = "call" if message.tool_calls is not None else role
    if not users:
        raise Defect("no_user_turn")
