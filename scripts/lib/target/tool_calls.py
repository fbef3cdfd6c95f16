"""Tool calls as a template wants them: ids of its form, arguments that are an object, results that say what they answer.

Sources leave out what their own trainer didn't need. Kimi's format holds a function's name only in the id of the call
(`functions.weather:0`, counted over the conversation: Moonshot's tool_call_guidance.md), Mistral's refuses ids that
aren't nine letters or digits, others print whatever stands there. So the form is learned by rendering, a source's own
ids are kept where the form allows, and results are matched with their calls by id, else by name, else in order.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from scripts.lib.core.exact_json import json_text, parse_json
from scripts.lib.core.records import Message
from scripts.lib.target.chat_template import given_arguments
from scripts.lib.target.model import Target
from scripts.lib.target.probes import ASK, CONTENT, NAME, RESULT, render

_ID = "IDm5"
_NINE = "abcdefgh9"


@dataclass(frozen=True)
class CallForm:
    """What a template asks of calls and results.

    Attributes:
        ids: `any` (printed or compared, whatever they are), `named` (the only place that holds the function's name),
            or `nine` (nine letters and digits).
        results_named: whether a result without the function's name is refused.
    """

    ids: str = "any"
    results_named: bool = False

    def applied(self, messages: list[Message]) -> list[Message]:
        """The conversation with calls and results of this form."""
        formed: list[Message] = []
        count = 0
        waiting: list[_Call] = []
        for message in messages:
            if message.role == "assistant" and message.tool_calls:
                waiting = [
                    self._call(call, count + number) for number, call in enumerate(parse_json(message.tool_calls))
                ]
                count += len(waiting)
                message = replace(message, tool_calls=json_text([call.formed for call in waiting]))
            elif message.role == "tool" and waiting:
                call = waiting.pop(_answered(waiting, message))
                name = message.name or (call.name if self.results_named else None)
                message = replace(message, tool_call_id=call.formed["id"], name=name)
            formed.append(message)
        return formed

    def _call(self, call: dict[str, Any], number: int) -> "_Call":
        function = dict(call["function"]) if isinstance(call.get("function"), dict) else dict(call)
        function["arguments"] = given_arguments(function)
        name, given = str(function.get("name", "")), call.get("id")
        formed = {**call, "function": function, "id": self._id(given, name, number)}
        return _Call(given, name, formed)

    def _id(self, given: Any, name: str, number: int) -> str:
        known = given if isinstance(given, str) and given else None
        if self.ids == "named":
            fits = known is not None and re.fullmatch(rf"(?:functions\.)?{re.escape(name)}:\d+", known)
            return known if known and fits else f"functions.{name}:{number}"
        if self.ids == "nine":
            # Of a longer one its end, as vLLM passes it on (mistral.py, truncate_tool_call_ids).
            end = (known or "")[-len(_NINE) :]
            return end if re.fullmatch(r"[a-zA-Z0-9]{9}", end) else f"{number:09d}"
        return known or f"call_{number}"


@dataclass(slots=True)
class _Call:
    given: Any  # the source's id
    name: str
    formed: dict[str, Any]


def _answered(waiting: list[_Call], result: Message) -> int:
    """Which of the calls that wait a result answers."""
    for key, value in (("given", result.tool_call_id), ("name", result.name)):
        for number, call in enumerate(waiting):
            if value is not None and getattr(call, key) == value:
                return number
    return 0


@functools.lru_cache(maxsize=8)
def form_of(target: Target) -> CallForm:
    """The form that a target's template wants, learned once."""
    shown = _rendered(target, _ID, None)
    if shown is not None:
        return CallForm(ids="named" if _ID in shown and NAME not in shown else "any")
    if _rendered(target, _NINE, None) is not None:
        return CallForm(ids="nine")
    return CallForm(results_named=_rendered(target, _ID, NAME) is not None)


def _rendered(target: Target, call_id: str, name: str | None) -> str | None:
    """A call and its result as the template renders them; None when it refuses."""
    attempts = (render(target, conversation, True) for conversation in _attempts(call_id, name))
    return next((shown for shown in attempts if shown is not None), None)


def _attempts(call_id: str, name: str | None) -> Iterator[list[Message]]:
    """With and without text beside the call: some templates want the one, some the other."""
    calls = json_text([{"id": call_id, "type": "function", "function": {"name": NAME, "arguments": {}}}])
    for content in ("", CONTENT):
        yield [
            ASK,
            Message("assistant", content, None, calls),
            Message("tool", RESULT, name=name, tool_call_id=call_id),
        ]
