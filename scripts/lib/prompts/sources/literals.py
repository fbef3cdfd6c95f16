"""Values that stand as text: JSON, or Python's way of writing it, which tables and careless exports hold instead."""

import ast
from typing import Any

from scripts.lib.core.exact_json import NotJson, parse_json


def read_literal(text: str) -> Any:
    """The value of a text of JSON or of a Python literal (`{'a': True}`). Raises NotJson."""
    try:
        return parse_json(text)
    except NotJson as error:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise error from None
