"""Limits that end an endless or exploding chat template with one line, and that no honest one comes near.

A template is a program of whoever published it. Jinja's sandbox keeps it from the machine, and lets it loop 10^10 times
(`{% for i in range(99999) %}{% for j in range(99999) %}`) or fill the memory (`{{ 'a' * 10**11 }}`).
"""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Rounds of one rendering's loops, some seconds, and more for each pair of messages: Gemma 4's template looks through
# all earlier ones for each.
MOST_ROUNDS = 5_000_000
ROUNDS_PER_PAIR = 8
MOST_SECONDS = 20  # of the processor, where single rounds take long; published templates take a ten-thousandth
_SECONDS_PER_PAIR = 1e-4
# Items of a text or list made by `*`, and characters of one that is assigned. A context of a million tokens is 5 MB.
MOST_ITEMS = 500_000_000
_MOST_BITS = 4096  # of a whole number made by `*` or `**`: 9**9**9**9 would be computed for ever
_MEMORY = 2 << 30  # bytes that trying a template on "Hello" may take
_ROUND, _SIZE = "drafter_round", "drafter_size"  # tests: the one call that the sandbox doesn't wrap

_GROWING = (nodes.Add, nodes.Concat, nodes.Mod, nodes.Filter, nodes.Call)

_rounds = threading.local()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with loops that are counted and values that can't explode."""

    intercepted_binops = frozenset({"*", "**"})  # never worked out at compile time, then

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tests |= {_ROUND: _count_round, _SIZE: _check_size}
        self.globals.pop("lipsum", None)  # text of any length, in loops that nobody counts

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, _checked(nodes.Const(None), _ROUND, loop.lineno))
            if loop.test is not None:  # rounds that it passes over take their time as well
                loop.test = nodes.And(_test(nodes.Const(None), _ROUND), loop.test)
        for parent in [*list(tree.find_all(nodes.Node)), tree]:
            for body in (getattr(parent, field, None) for field in ("body", "else_")):
                if isinstance(body, list):
                    body[:] = [part for node in body for part in (node, *_size_of(node))]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Sizes are known before anything is made."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(times, int) and len(value) * times > MOST_ITEMS:
                    raise TemplateRuntimeError(f"makes a value of {len(value)} * {times} items")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateRuntimeError(f"makes a number of {bits} bits")
        return super().call_binop(context, operator, left, right)


def _test(value: nodes.Expr, name: str) -> nodes.Test:
    return nodes.Test(value, name, [], [], None, None)


def _checked(value: nodes.Expr, test: str, line: int) -> nodes.Node:
    return nodes.ExprStmt(_test(value, test)).set_lineno(line)


def _size_of(node: nodes.Node) -> Iterator[nodes.Node]:
    """A check of what was assigned: text that doubles in a loop gets out of hand in forty rounds."""
    if isinstance(node, nodes.Assign) and _may_grow(node.node):
        if isinstance(node.target, nodes.NSRef):
            value = nodes.Getattr(nodes.Name(node.target.name, "load"), node.target.attr, "load")
            yield _checked(value, _SIZE, node.lineno)
        elif isinstance(node.target, nodes.Name):
            yield _checked(nodes.Name(node.target.name, "load"), _SIZE, node.lineno)


def _may_grow(value: nodes.Node) -> bool:
    """Whether a value may be longer than what it is made of."""
    return isinstance(value, _GROWING) or next(value.find_all(_GROWING), None) is not None


@pass_context  # else it would be called once, at compile time, as its argument is constant
def _count_round(_context: Context, _: None) -> bool:
    _rounds.left -= 1
    if _rounds.left < 0:
        raise TemplateRuntimeError(f"does not end: more than {MOST_ROUNDS:,} rounds of its loops")
    if not _rounds.left & 255 and time.thread_time() > _rounds.until:
        raise TemplateRuntimeError(f"does not end: more than {MOST_SECONDS} seconds of one rendering")
    return True


def _check_size(value: Any) -> bool:
    if isinstance(value, str) and len(value) > MOST_ITEMS:
        raise TemplateRuntimeError(f"makes a text of {len(value):,} characters")
    return True


def begin_rendering(messages: int) -> None:
    """Call before a conversation of so many messages is rendered: its rounds are counted from here."""
    _rounds.left = MOST_ROUNDS + ROUNDS_PER_PAIR * messages**2
    _rounds.until = time.thread_time() + MOST_SECONDS + _SECONDS_PER_PAIR * messages**2


@contextmanager
def limited_memory() -> Iterator[None]:
    """Inside, what would take more than _MEMORY raises MemoryError. For the main thread, and no other that allocates."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limits = [mapped + _MEMORY, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
