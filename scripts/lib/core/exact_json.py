"""JSON whose numbers stay what they were: orjson makes floats of integers beyond 64 bits, and null of NaN.

The first changes ids silently (`order: 123456789012345678901234567890` becomes `1.2345678901234568e+29`, orjson issues
53, 116 and 517), the second turns a value that JSON doesn't know into one that it does.
"""

import json
import re
from typing import Any

import orjson

_LONG_BYTES = re.compile(rb"[0-9]{19}")
_LONG_TEXT = re.compile("[0-9]{19}")


class NotJson(ValueError):
    """A text that isn't JSON, or a value that JSON can't say."""


def read_json(data: bytes | str) -> Any:
    """The value of a JSON text; integers of any size are exact. Raises NotJson.

    What orjson refuses but people's files hold (NaN, lone surrogates) is read as the standard library does.
    """
    long = _LONG_TEXT if isinstance(data, str) else _LONG_BYTES
    try:
        return orjson.loads(data) if long.search(data) is None else json.loads(data)  # type: ignore[arg-type]
    except orjson.JSONDecodeError as error:
        try:
            return json.loads(data if isinstance(data, str) else data.decode())
        except (ValueError, RecursionError):
            raise NotJson(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


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
