"""JSON whose numbers stay what they were: orjson makes floats of integers beyond 64 bits, and null of NaN.

The first changes ids silently (`order: 123456789012345678901234567890` becomes `1.2345678901234568e+29`, orjson issues
53, 116 and 517), the second turns a value that JSON doesn't know into one that it does.
"""

import json
from typing import Any

import orjson

_HARMLESS = frozenset({str, int, bool, type(None)})
_INTEGERS_END = 9.2e18  # just below 2^63: a float beyond it may have been an integer


class NotJson(ValueError):
    """A text that isn't JSON, or a value that JSON can't say."""


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text; integers of any size are exact. Raises NotJson.

    What orjson refuses but people's files hold (NaN, lone surrogates) is read as the standard library does.
    """
    try:
        value = orjson.loads(data)
        if not _holds_large(value):
            return value
    except (orjson.JSONDecodeError, RecursionError):
        pass
    try:
        return json.loads(data if isinstance(data, str) else data.decode())
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def _holds_large(value: Any) -> bool:
    """Whether a float is so large that it may have been an integer. Texts and small integers, most of it, cost little."""
    kind = type(value)
    if kind is dict:
        items = value.values()
    elif kind is list and not _HARMLESS.issuperset(map(type, value)):
        items = value
    else:
        return kind is float and not -_INTEGERS_END < value < _INTEGERS_END
    for item in items:  # noqa: SIM110 - any() takes a third longer
        if type(item) not in _HARMLESS and _holds_large(item):
            return True
    return False


def json_text(value: Any) -> str:
    """Compact JSON text of a value. Raises NotJson for what JSON can't say: NaN, infinity, lone surrogates, bytes."""
    try:
        text = orjson.dumps(value).decode()
        if "null" not in text:  # what orjson writes for NaN and infinity as well
            return text
    except TypeError:
        text = ""
    try:
        exact = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        exact.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    return text or exact
