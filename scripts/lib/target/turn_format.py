"""How a template's model writes an assistant turn: the text between the generation prompt and the end of the turn.

Needed where only text is known: ready conversations (class A) and engines that return text. Templates don't render it:
those of Kimi-K2.5, DeepSeek-V3.1 and Qwen3 delete a turn's thought from a finished conversation. So the format is
learned from the template by rendering marked messages, and the turn is put together from that.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.core.records import Message
from scripts.lib.target import thoughts
from scripts.lib.target.model import Target
from scripts.lib.target.probes import ASK, CONTENT, RESULT, THOUGHT, render, shown_thoughts


class NotWritable(ValueError):
    """A turn that the target's format has no place for."""


@dataclass(frozen=True)
class TurnFormat:
    """Texts around thought and content of a generated turn. All empty but `end` when the model has no thoughts."""

    end: str  # token that ends the turn
    before_open: str = ""  # between the generation prompt and the opening tag, where the model writes that itself
    open: str = ""
    after_open: str = ""
    before_close: str = ""
    close: str = ""
    after_close: str = ""
    trims: bool = False  # the template shows answers without the blanks at their ends (Llama, Gemma)

    def apart(self, message: Message) -> Message:
        """An answer whose thought stands between tags in its content, with the thought in its own field.

        For ready conversations only, where nothing but text is known.
        """
        if message.role != "assistant" or message.reasoning is not None or not self.close:
            return message
        found = thoughts.split_anyhow(message.content, (self.open, self.close))
        return message if found is None else dataclasses.replace(message, content=found[1], reasoning=found[0])

    def shown(self, message: Message) -> Message:
        """An answer as the template shows it in a conversation: without its outer blanks where it trims.

        For ready conversations only: else no later turn would merge with it.
        """
        if message.role != "assistant" or not self.trims or message.content == message.content.strip():
            return message
        return dataclasses.replace(message, content=message.content.strip())

    def write(self, target: Target, prompt: str, message: Message, finished: bool = True) -> tuple[str, list[str]]:
        """The text that the model would have written after `prompt` to give `message`, and flags.

        `finished`: False for an answer that was cut at max_tokens; it gets no end, and a thought without content
        stays open. Raises NotWritable when the format has no place for a part of the message.
        """
        if target.harmony is not None:
            return _write_harmony(target, message, finished), []
        flags: list[str] = []
        if message.reasoning is None and thoughts.looks_like_thought(message.content):
            flags.append("thought_in_text")
        text = ""
        inside = bool(self.open) and prompt.rstrip().endswith(self.open)
        closed = bool(self.close) and prompt.rstrip().endswith(self.close)
        reasoning = message.reasoning
        if reasoning is not None and (closed or not self.open):
            flags.append("reasoning_dropped")  # the pinned template says that the model doesn't think
            reasoning = None
        if inside and reasoning is None:
            flags.append("empty_thought")
            reasoning = ""
        if reasoning is not None:
            if not inside:
                text += self.before_open + self.open + self.after_open
            elif not prompt.endswith(self.open + self.after_open):
                text += self.after_open
            text += reasoning.strip("\n") if self.before_close or self.after_open else reasoning
            if not finished and not message.content and not message.tool_calls:
                return text, flags
            text += self.before_close + self.close
            if message.content or message.tool_calls:
                text += self.after_close
        elif closed and not prompt.endswith(self.close + self.after_close):
            text += self.after_close  # GLM prefills `<think></think>` without the line break that follows it
        text += message.content
        end = self.end
        if message.tool_calls:
            section, end = _tool_section(target, self, message)
            text += section
        return text + (end if finished else ""), flags


def learn(target: Target) -> TurnFormat:
    """The turn format of a target, from its own template."""
    answer = [ASK, Message("assistant", f"  {CONTENT}  "), ASK]
    shown = render(target, answer, True) or ""
    trims = CONTENT in shown and f" {CONTENT}" not in shown and f"{CONTENT} " not in shown
    return dataclasses.replace(_learned(target), trims=trims)


def _learned(target: Target) -> TurnFormat:
    if target.harmony is not None:
        return TurnFormat(end="<|return|>")
    end = _end(target)
    if target.think_tags is None or not any(tag in target.template for tag in target.think_tags):
        return TurnFormat(end)  # Qwen3-2507-Instruct has the tokens, its model doesn't think
    opening, closing = target.think_tags
    prompt = target.render_text([ASK])
    # Gemma 4 names its channel after the opening tag.
    shown = re.compile(
        rf"(\s*){re.escape(opening)}(\s*\w*:?\s*){THOUGHT}(\s*){re.escape(closing)}(?:(\s*){CONTENT})?", re.DOTALL
    )
    for rendered in shown_thoughts(target):
        match = shown.search(rendered)
        if match:
            before = rendered[len(prompt) : match.end(1)] if rendered.startswith(prompt) else ""
            return TurnFormat(end, before, opening, match[2], match[3], closing, match[4] or "")
    # The template never shows a thought (DeepSeek-V3.1, R1, SmolLM3). Where it prefills an empty one, or opens one in
    # the generation prompt, the line breaks there tell whether tags stand on lines of their own.
    empty = re.search(rf"{re.escape(opening)}((?:\\n)*){re.escape(closing)}((?:\\n)*)", target.template)
    if prompt.endswith(opening + "\n") or (target.think_texts and not prompt.endswith(opening)):
        return TurnFormat(end, "", opening, "\n", "\n", closing, "\n\n")
    if empty and empty[1]:
        return TurnFormat(end, "", opening, "\n", "\n", closing, "\n" * empty[2].count("n"))
    return TurnFormat(end, "", opening, "", "", closing, "")


def _end(target: Target) -> str:
    """The token that ends a turn: the first of the target's stop tokens that the template puts after an answer."""
    answer = Message("assistant", CONTENT)
    for messages, generation_prompt in (([ASK, answer, ASK], True), ([ASK, answer], False)):
        rendered = target.render_text(messages, generation_prompt=generation_prompt)
        match = _stop_tokens(target).search(rendered, rendered.find(CONTENT) + len(CONTENT))
        if match:
            return match[0]
    return min(text for text, token in target.structural_texts.items() if token in target.eos_ids)


def _stop_tokens(target: Target) -> re.Pattern:
    ends = (text for text, token in target.structural_texts.items() if token in target.eos_ids)
    return re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))))


def _tool_section(target: Target, form: TurnFormat, message: Message) -> tuple[str, str]:
    """The template's text of a message's tool calls, from after its content, and the token that ends the turn then.

    GLM-4.5 ends a turn that calls a tool with `<|observation|>`, others with `<|user|>`.
    """
    content = CONTENT if message.content.strip() else ""
    call = [ASK, Message("assistant", content, None, message.tool_calls)]
    try:
        rendered = target.render_text([*call, Message("tool", RESULT)], generation_prompt=False)
    except ValueError:  # some templates want more of a tool's message than that
        rendered = target.render_text(call, generation_prompt=False)
    if content:
        _, found, rest = rendered.partition(content)
        if not found:
            raise NotWritable("the chat template shows no content beside tool calls")
    else:
        prefilled = rf"\s*{re.escape(form.open)}\s*({re.escape(form.close)}\s*)?" if form.open else r"\s*"
        header = re.sub(rf"({prefilled})$", "", target.render_text([ASK]))
        rest = rendered.removeprefix(header) if rendered.startswith(header) else ""
        if form.close and form.close in rest:
            rest = rest[rest.index(form.close) + len(form.close) :].removeprefix(form.after_close)
        rest = rest.lstrip("\n")
    match = _stop_tokens(target).search(rest)
    if match is None or match.start() == 0:
        raise NotWritable("the chat template shows tool calls elsewhere than in the assistant's turn")
    return rest[: match.start()], match[0]


def _write_harmony(target: Target, message: Message, finished: bool) -> str:
    """gpt-oss: one message per channel, the last one ended by <|return|>, or by <|call|> where it calls a tool."""
    text = ""
    if message.reasoning is not None:
        text = f"<|channel|>analysis<|message|>{message.reasoning}"
        if not finished and not message.content:
            return text
        text += "<|end|><|start|>assistant"
    if message.tool_calls:
        if message.content:
            raise NotWritable("gpt-oss writes no final answer beside a tool call")
        rendered = target.render_text(
            [ASK, Message("assistant", "", None, message.tool_calls)], generation_prompt=False
        )
        prompt = target.render_text([ASK])
        return text + rendered[len(prompt) :]
    return text + f"<|channel|>final<|message|>{message.content}" + ("<|return|>" if finished else "")


@functools.lru_cache(maxsize=8)
def of(target: Target) -> TurnFormat:
    """The turn format of a target, learned once."""
    return learn(target)


def knows_thoughts(target: Target) -> bool:
    """Whether the target's template has a place for thoughts at all."""
    return target.harmony is not None or bool(of(target).open)


def thinking_is_off(target: Target, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends with a thought that its template has closed already: the answer is to have none."""
    close = of(target).close
    return bool(close) and target.decode(prompt_ids[-8:]).rstrip().endswith(close)
