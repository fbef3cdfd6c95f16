"""Chat templates, rendered byte for byte as transformers renders them, without transformers, on a day that stands still.

For example, `compile_template("{{ messages[0].content }}", {})([{"role": "user", "content": "Hi"}], None, False)` is
"Hi". The import of transformers costs every job a second, and `apply_chat_template` several times what the template itself does. What
templates are written for is Jinja in an immutable sandbox with a few names more. Tests compare the two on all
published templates.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import NotJson, parse_json
from scripts.lib.core.records import Message
from scripts.lib.target.bounds import BoundedEnvironment, begin_rendering

# Names under which chats carry a thought, the usual one first.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class Renderer(Protocol):
    """Renders a conversation; `more` are template variables of this conversation alone."""

    def __call__(self, messages: list[dict], tools: list[dict] | None, generation_prompt: bool, **more: Any) -> str: ...


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; the text is that of the body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, whose assignments stay inside.
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """What templates may do with `dict`: its class would lead out of the sandbox."""

    def __call__(self, *arguments: Any, **named: Any) -> dict:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore, which lead to Python's internals."""

    def __init__(*arguments: Any, **named: Any) -> None:  # so that a template may name one `self`
        self, *rest = arguments
        attributes = dict(*rest, **named)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as Python writes it. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def parsed(template: str) -> nodes.Template:
    """The syntax tree of a template. Raises jinja2.TemplateSyntaxError."""
    return _environment().parse(template)


def compile_template(template: str, variables: Mapping[str, Any]) -> Renderer:
    """The function that renders a template; `variables` are what it sees besides the messages.

    Messages, tools and variables must be plain JSON values. The function raises whatever the template does.
    """
    variables = {"documents": None, **variables}
    compiled: jinja2.Template | None = None  # at the first use: a syntax error is the template's refusal too

    def render(messages: list[dict], tools: list[dict] | None, generation_prompt: bool, **more: Any) -> str:
        nonlocal compiled
        if compiled is None:
            compiled = _environment().from_string(template)
            compiled.globals = dict(compiled.globals)  # copied by every rendering: a dict, not a chain of them
        if tools is not None:
            for tool in tools:
                if not isinstance(tool, dict):
                    raise ValueError(f"a tool is no JSON object: {tool!r}")
        begin_rendering(len(messages))
        return compiled.render(
            messages=[_with_thought(message) for message in messages],
            tools=tools,
            add_generation_prompt=generation_prompt,
            **{**variables, **more},
        )

    return render


def _with_thought(message: dict) -> dict:
    """The message with its thought under every name that templates read."""
    for name in _THOUGHTS:
        thought = message.get(name)
        if thought is not None:
            return {"thinking": thought, **message, "reasoning_content": thought}
    return message


def template_message(message: Message) -> dict[str, Any]:
    """What templates read of a message: as it goes over the wire, and its thought under the names of single families.

    Apriel and MiniCPM3 read `thought`, Command R `tool_plan` where a turn calls tools.
    """
    fields = message.for_template()
    if message.reasoning is not None:
        fields["thought"] = message.reasoning
        if message.tool_calls is not None:
            fields["tool_plan"] = message.reasoning
    return fields


def with_arguments(conversation: list[dict], as_text: bool) -> list[dict]:
    """The conversation with the arguments of each tool call as JSON text or as an object; what a source left out is {}."""
    return [
        {**message, "tool_calls": [_with_arguments(call, as_text) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in conversation
    ]


def _with_arguments(call: dict, as_text: bool) -> dict:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = given_arguments(function)
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not as_text and isinstance(arguments, str):
        # What a model garbled stays text.
        with contextlib.suppress(NotJson):
            arguments = parse_json(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def given_arguments(function: Mapping[str, Any]) -> Any:
    """Arguments of a call; {} where a source has none: "", null or no key (vLLM and SGLang do the same)."""
    arguments = function.get("arguments")
    empty = arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null"))
    return {} if empty else arguments


_CLOCK = re.compile(r"""\bstrftime_now\(\s*(?:format\s*=\s*)?(?:'([^']*)'|"([^"]*)")\s*\)""")


def frozen_template(template: str, date: str) -> str:
    """The template with every reading of the clock replaced by `date`, so that ids don't change overnight.

    gpt-oss, Llama-3.2, Mistral and SmolLM3 call `strftime_now("%d %B %Y")`. transformers lets nobody pass another
    clock (callables become text), and engines don't either. Raises UserError for a call that can't be evaluated here.
    """
    frozen = datetime.datetime.fromisoformat(date)
    text = _CLOCK.sub(lambda call: orjson.dumps(frozen.strftime(call[1] or call[2] or "")).decode(), template)
    if re.search(r"\bstrftime_now\(", text):
        raise UserError(
            "the chat template reads the clock in a way that can't be frozen: name a copy in `model.chat_template`"
        )
    return text


def template_variables(template: str, kwargs: dict[str, Any], date: str) -> dict[str, Any]:
    """What the template sees besides the messages: the pinned kwargs, and `date_string` where it needs one.

    A template that has a date of its own keeps it: Llama-3.1 falls back to a fixed one, and the servers that the
    drafter will meet don't send any.
    """
    variables: dict[str, Any] = {}
    if "date_string" in template and not re.search(r"set\s+date_string\s*=", template):
        variables["date_string"] = datetime.datetime.fromisoformat(date).strftime("%d %b %Y")
    return variables | kwargs
