"""Conversations that stand as one text, with markers of who speaks, brought back to turns.

Guanaco (`### Human:`), ChatML, Zephyr, Llama 2 and 3, Gemma, Vicuna (`USER:`), Anthropic (`Human:`), OIG, Baize.
Sent as they are, they would be one prompt with the answers in it.
"""

import re

from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect

_SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user",
    "assistant": "assistant", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function response": "tool", "observation": "tool",
}  # fmt: skip
# Alpaca's; elsewhere people use these words as headings.
_ALPACA = {"instruction": "user", "input": "input", "response": "assistant", "system": "system"}
_NAMES = "|".join(sorted(_SPEAKERS, key=len, reverse=True))
_HASHES = r"(?:\A|\n|(?<=[^\n#]))###\s*({})\s*:\s*"
_STARTS = re.compile(
    r"(?:\s|<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<\|startoftext\|>|\[gMASK\]<sop>"
    r"|BEGINNING OF CONVERSATION:)*"
)
_ENDS = re.compile(
    r"(?:\s|</s>|<s>|<eos>|<\|im_end\|>|<\|eot_id\|>|<\|end\|>|<\|endoftext\|>|<\|end_of_text\|>|<end_of_turn>"
    r"|<\|end_of_turn\|>|###\s*End"
    r"|<｜end▁of▁sentence｜>)*\Z"
)
# How a marker looks; group 1 is the speaker. A text is read by the first style that it opens with.
_MARKERS = (
    re.compile(r"<\|im_start\|>\s*(\w+)[ \t]*\n?"),
    re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*"),
    re.compile(r"<start_of_turn>(\w+)\s*"),
    re.compile(rf"<\|({_NAMES})\|>:?\s*", re.IGNORECASE),
    re.compile(rf"<｜({_NAMES})｜>\s*", re.IGNORECASE),
    re.compile(rf"\[\|({_NAMES})\|\]:?\s*", re.IGNORECASE),
    re.compile(rf"<({_NAMES})>:\s*", re.IGNORECASE),
    re.compile(r"GPT4 Correct (User|Assistant):\s*"),
    re.compile(rf"(?:\A|\n)\*\*({_NAMES})(?::\*\*|\*\*:)\s*", re.IGNORECASE),
    re.compile(_HASHES.format(_NAMES), re.IGNORECASE),
)
_INSTRUCTION = re.compile(_HASHES.format("|".join(_ALPACA)), re.IGNORECASE)
# Names with nothing but a colon: people write `User: ...` themselves, so only as the start of a line, and never alone.
_PLAIN = re.compile(
    r"(?:\A|\n)[ \t]*(Human|User|USER|Assistant|ASSISTANT|AI|Bot|GPT|ChatGPT|System|SYSTEM|FUNCTION RESPONSE)[ \t]*:[ \t]*"
)
_CAPITALS = re.compile(r"(?:\A|\s|(?<=</s>))(USER|ASSISTANT|SYSTEM|FUNCTION RESPONSE|GPT):\s*")
# Question and answer. In a prompt they are examples, or what the model should go on with; a document holds both.
_DOCUMENTS = (
    (re.compile(r"(?:\A|\n)[ \t]*(Question|Answer)[ \t]*:[ \t]*"), {"question": "user", "answer": "assistant"}),
    (re.compile(r"(?:\A|\n)[ \t]*(Q|A)[ \t]*:[ \t]*"), {"q": "user", "a": "assistant"}),
    (re.compile(r"(?:\A|\n)[ \t]*(Instruct|Output)[ \t]*:[ \t]*"), {"instruct": "user", "output": "assistant"}),
)
_PREAMBLE = re.compile(r"\A\s*(?:Below is an instruction that describes|A chat between a )")
# Markers of models that are not known here (Command R, gpt-oss, Kimi): no question begins so.
_FOREIGN = re.compile(r"<\|[\w ]{2,40}\|>|\[SYSTEM_PROMPT\]")
_LLAMA_2 = re.compile(r"\[(/?)INST\]")
_LLAMA_2_SYSTEM = re.compile(r"\A\s*<<SYS>>\s*(.*?)\s*<</SYS>>\s*", re.DOTALL)


def turns_in(text: str, document: bool = False) -> list[Message] | None:
    """The turns of a text that is a transcript; None when it is an ordinary text.

    `document`: question and answer are a transcript too, where an answer is there. The last turn may be an empty answer, which is left out: there the model should go on. Raises Defect `transcript`
    for a text that opens with a marker, but can't be told apart.
    """
    start = _STARTS.match(text)
    body = text[start.end() :] if start else text
    if _LLAMA_2.match(body):
        return _checked(_llama_2(body))
    for marker in _MARKERS:
        if marker.match(body):
            return _checked(_split(marker, body))
    if _INSTRUCTION.match(body):
        return _checked(_split(_INSTRUCTION, body, _ALPACA))
    if _PLAIN.match(body):
        style = _CAPITALS if _CAPITALS.match(body) else _PLAIN
        return _plain(style, body)
    for marker, speakers in _DOCUMENTS if document else ():
        if marker.match(body):
            turns = _split(marker, body, speakers)
            return turns if turns[-1].role == "assistant" and turns[-1].content else None
    if (foreign := _FOREIGN.match(body)) and len(body) > foreign.end():
        raise Defect("transcript", f"opens with {foreign[0]!r}")
    if _PREAMBLE.match(body):
        for marker, speakers in ((_INSTRUCTION, _ALPACA), (_MARKERS[-1], _SPEAKERS), (_CAPITALS, _SPEAKERS)):
            first = marker.search(body)
            if first:
                system = Message("system", body[: first.start()].strip())
                return [system, *_checked(_split(marker, body[first.start() :], speakers))]
    return None


def _plain(style: re.Pattern, body: str) -> list[Message] | None:
    turns = _split(style, body)
    roles = {turn.role for turn in turns}
    if roles == {"system"}:
        return None  # `System: Windows 11`
    if "assistant" not in roles:
        raise Defect("transcript", f"opens with {body[:20]!r}, and nobody answers")
    return _checked(turns)


def _split(marker: re.Pattern, body: str, speakers: dict[str, str] = _SPEAKERS) -> list[Message]:
    found = list(marker.finditer(body))
    turns: list[Message] = []
    for number, match in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(body)
        text = _ENDS.sub("", body[match.end() : end]).strip()
        role = speakers.get(" ".join(match[1].lower().split()))
        if role is None:
            raise Defect("transcript", f"the speaker {match[1]!r}")
        if role == "input":  # alpaca's: what the instruction is about
            if not turns or turns[-1].role != "user":
                raise Defect("transcript", "an input without an instruction")
            turns[-1].content = "\n\n".join(part for part in (turns[-1].content, text) if part)
        else:
            turns.append(Message(role, text))
    return turns


def _llama_2(body: str) -> list[Message]:
    turns: list[Message] = []
    pieces = _LLAMA_2.split(body)[1:]
    for closing, text in zip(pieces[::2], pieces[1::2]):
        system = _LLAMA_2_SYSTEM.match(text) if not turns else None
        if system:
            turns.append(Message("system", system[1]))
            text = text[system.end() :]
        turns.append(Message("assistant" if closing else "user", _ENDS.sub("", text).strip()))
    return turns


def _checked(turns: list[Message]) -> list[Message]:
    if turns and turns[-1].role == "assistant" and not turns[-1].content:
        turns.pop()
    if not any(turn.role == "user" for turn in turns):
        raise Defect("transcript", "nobody asks")
    return turns
