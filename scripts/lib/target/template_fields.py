"""Which fields of messages and tool calls a chat template reads: what is not kept of a source can't arrive there.

Read from the template's syntax tree, following what is a message and what a call through loops, assignments and macros.
For example, `{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ c['id'] }}{% endfor %}{% endfor %}` reads
`role` and `tool_calls` of a message and `id` of a call.
"""

from collections import defaultdict
from collections.abc import Mapping

from jinja2 import nodes

from scripts.lib.target.chat_template import parsed

# What an item of a list is, and what a field of a thing is.
_ITEMS = {"messages": "message", "calls": "call"}
_FIELDS = {("message", "tool_calls"): "calls", ("call", "function"): "function"}
_METHODS = {"get", "items", "keys", "values"}
_KEEPING = {
    "list",
    "reverse",
    "select",
    "selectattr",
    "rejectattr",
    "default",
    "sort",
}  # filters: the same kind of list
_BY_NAME = {"selectattr", "rejectattr", "map", "groupby"}  # filters that read a field of each item


def fields_read(template: str) -> Mapping[str, set[str]]:
    """`message`, `call` and `function` -> names of the fields that a template reads of them."""
    flow = _Flow(parsed(template))
    return {thing: flow.fields[thing] - _METHODS for thing in ("message", "call", "function")}


class _Flow:
    """What each name of a template may stand for; found by going over it until nothing new comes."""

    def __init__(self, tree: nodes.Template) -> None:
        self.fields: dict[str, set[str]] = defaultdict(set)
        self._names: dict[str, set[str]] = defaultdict(set, {"messages": {"messages"}})
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        everything = list(tree.find_all(nodes.Node))
        known = -1
        while known != (known := sum(map(len, self._names.values()))):
            for node in everything:
                self._visit(node)

    def _visit(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.For):
            self._bind(node.target, self._items(self._kinds(node.iter)))
            for name in ("loop.previtem", "loop.nextitem"):
                self._names[name] |= self._items(self._kinds(node.iter))
        elif isinstance(node, nodes.Assign):
            self._bind(node.target, self._kinds(node.node))
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in self._macros:
            for parameter, value in zip(self._macros[node.node.name].args, node.args):
                self._bind(parameter, self._kinds(value))
            for named in node.kwargs:
                self._names[named.key] |= self._kinds(named.value)
        elif isinstance(node, nodes.Expr):
            self._kinds(node)

    def _bind(self, target: nodes.Node, kinds: set[str]) -> None:
        if isinstance(target, nodes.Name):
            self._names[target.name] |= kinds
        elif isinstance(target, nodes.NSRef):
            self._names[f"{target.name}.{target.attr}"] |= kinds

    def _read(self, things: set[str], field: object) -> set[str]:
        if not isinstance(field, str):
            return set()
        for thing in things - set(_ITEMS):
            self.fields[thing].add(field)
        return {kind for (thing, name), kind in _FIELDS.items() if thing in things and name == field}

    @staticmethod
    def _items(kinds: set[str]) -> set[str]:
        return {_ITEMS[kind] for kind in kinds if kind in _ITEMS}

    def _kinds(self, node: nodes.Node | None) -> set[str]:
        """What the value of an expression may be."""
        if isinstance(node, nodes.Name):
            return set(self._names[node.name])
        if isinstance(node, nodes.Getattr):
            of_namespace = f"{node.node.name}.{node.attr}" if isinstance(node.node, nodes.Name) else ""
            return set(self._names.get(of_namespace, ())) | self._read(self._kinds(node.node), node.attr)
        if isinstance(node, nodes.Getitem):
            kinds = self._kinds(node.node)
            if isinstance(node.arg, nodes.Slice):
                return kinds
            return self._items(kinds) | self._read(kinds, getattr(node.arg, "value", None))
        if (
            isinstance(node, nodes.Call)
            and isinstance(node.node, nodes.Getattr)
            and node.node.attr == "get"
            and node.args
        ):
            return self._read(self._kinds(node.node.node), getattr(node.args[0], "value", None))
        if isinstance(node, nodes.Filter):
            return self._filtered(node)
        if isinstance(node, nodes.CondExpr):
            return self._kinds(node.expr1) | self._kinds(node.expr2)
        if isinstance(node, nodes.BinExpr):
            return self._kinds(node.left) | self._kinds(node.right)
        if isinstance(node, nodes.Compare) and isinstance(node.expr, nodes.Const):
            for operand in node.ops:
                if operand.op in ("in", "notin"):  # 'name' in message
                    self._read(self._kinds(operand.expr), node.expr.value)
        return set()

    def _filtered(self, node: nodes.Filter) -> set[str]:
        kinds = self._kinds(node.node)
        if node.name in _BY_NAME and node.args:
            self._read(self._items(kinds), getattr(node.args[0], "value", None))
        if node.name in ("first", "last"):
            return self._items(kinds)
        return kinds if node.name in _KEEPING else set()
