"""Arrow columns to the values that their writer meant, so that a row is the same in Parquet, Arrow and JSON.

Storage is no data:
- A struct column gives each of its rows the keys of all of them, and null to those that a row doesn't have (ms-swift
  issue 6467, verl issue 4112). A null of a struct is therefore an absent key. A key that is null in every row is none
  that others lent: it stays, where its row lacks no other key.
- A logical type is what its storage means: `arrow.json` (which `datasets` 4.7 and later write for columns of mixed
  types, datasets pull request 8027) is parsed, binary that holds text is text, a class label is its name, a decimal
  a number, a date the ISO 8601 text that JSON would hold.
"""

import datetime
import decimal
import itertools
import json
import struct
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from scripts.lib.core.exact_json import parse_json

Feature = Any  # what `datasets` writes of a column beside its type: {"_type": "ClassLabel", "names": [...]}, ...
VECTOR = 32  # longer lists of floats are embeddings, which nobody reads as text


def features(schema: pa.Schema) -> dict[str, Feature]:
    """What the schema's metadata says of the columns in `datasets`' terms; {} where another program wrote the file."""
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def rows_of(batch: pa.RecordBatch, features: dict[str, Feature]) -> list[dict[str, Any]]:
    """The rows of a batch. Raises ValueError (UnicodeDecodeError, NotJson) when a cell can't be read as its type."""
    names = batch.schema.names
    columns = [values(column, features.get(name)) for name, column in zip(names, batch.columns)]
    return [dict(zip(names, cells)) for cells in zip(*columns)] if columns else [{} for _ in range(batch.num_rows)]


def values(array: pa.Array, feature: Feature = None) -> list[Any]:
    """The values of an array, null as None. Raises ValueError when one can't be read as its type."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _extensions(array, feature)
    nested = next((read for is_kind, read in _NESTED if is_kind(kind)), None)
    if nested is not None:
        return nested(array, feature) if len(array) else []
    if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and types.is_integer(kind):
        return _labels(array.to_pylist(), feature.get("names"))
    leaf = next((read for is_kind, read in _LEAVES if is_kind(kind)), None)
    if leaf is None:
        return array.to_pylist()
    return [None if value is None else leaf(value, kind) for value in _microseconds(array).to_pylist()]


def _labels(numbers: list[int | None], names: Any) -> list[Any]:
    if not isinstance(names, list):
        return numbers
    return [names[number] if number is not None and 0 <= number < len(names) else number for number in numbers]


def _structs(array: pa.StructArray, feature: Feature) -> list[dict[str, Any] | None]:
    names = [field.name for field in array.type]
    if len(set(names)) != len(names):
        raise ValueError(f"a struct has two fields of one name: {', '.join(names)}")
    fields = [array.field(index) for index in range(len(names))]
    # By validity, not by value: the JSON text `null` is a null that somebody wrote.
    gaps = [field.is_null().to_pylist() if field.null_count else None for field in fields]
    lent = [found for found, field in zip(gaps, fields) if found is not None and not types.is_null(field.type)]
    padded = [any(row) for row in zip(*lent)] if lent else None
    rows: list[dict[str, Any]] = [{} for _ in range(len(array))]
    for name, field, absent in zip(names, fields, gaps):
        column = values(field, _part(feature, name))
        absent = padded if types.is_null(field.type) else absent
        if absent is None:
            for row, value in zip(rows, column):
                row[name] = value
        else:
            for row, value, gap in zip(rows, column, absent):
                if not gap:
                    row[name] = value
    return _with_nulls(array, rows)


def _lists(array: pa.ListArray, feature: Feature) -> list[list[Any] | None]:
    if types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_field))
    offsets = array.offsets.to_pylist()
    start, length = offsets[0], offsets[-1] - offsets[0]
    inner = array.values.slice(start, length)
    if types.is_floating(inner.type) and length > VECTOR * len(array):
        items = inner.to_pylist()
    else:
        items = values(inner, _part(feature, "feature"))
    return _with_nulls(array, [items[first - start : last - start] for first, last in itertools.pairwise(offsets)])


def _list_views(array: pa.ListViewArray, feature: Feature) -> list[list[Any] | None]:
    return _lists(pa.array(array.to_pylist(), pa.large_list(array.type.value_field)), feature)


def _maps(array: pa.MapArray, feature: Feature) -> list[dict[str, Any] | None]:
    """Maps name the keys that a row has, so their nulls stay."""
    offsets = array.offsets.to_pylist()
    start, length = offsets[0], offsets[-1] - offsets[0]
    keys, items = (values(side.slice(start, length)) for side in (array.keys, array.items))
    entries = [(key if isinstance(key, str) else json.dumps(key, default=str), item) for key, item in zip(keys, items)]
    rows = [dict(entries[first - start : last - start]) for first, last in itertools.pairwise(offsets)]
    return _with_nulls(array, rows)


def _with_nulls(array: pa.Array, rows: list[Any]) -> list[Any]:
    if not array.null_count:
        return rows
    return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist())]


def _extensions(array: pa.ExtensionArray, feature: Feature) -> list[Any]:
    read = _OF_EXTENSIONS.get(array.type.extension_name)
    if read is None:
        return values(array.storage, feature)
    return [None if value is None else read(value) for value in array.storage.to_pylist()]


def _unions(array: pa.UnionArray, feature: Feature) -> list[Any]:
    """Mixed types: each value by the type that it has."""
    return [values(pa.array([scalar.value.as_py()], scalar.value.type))[0] for scalar in array]


def _part(feature: Feature, name: str) -> Feature:
    """What is known of a field of a struct, or of a list's items (older versions write `[feature]`)."""
    if isinstance(feature, list):
        return feature[0] if feature and name == "feature" else None
    return feature.get(name) if isinstance(feature, dict) else None


def _microseconds(array: pa.Array) -> pa.Array:
    """Times of nanoseconds in microseconds: Python's datetime knows no less."""
    kind = array.type
    if getattr(kind, "unit", None) != "ns":
        return array
    if types.is_timestamp(kind):
        return array.cast(pa.timestamp("us", kind.tz), safe=False)
    return array.cast(pa.time64("us") if types.is_time64(kind) else pa.duration("us"), safe=False)


def _text(data: bytes, kind: pa.DataType) -> bytes | str:
    """Text that a writer without logical types stored as bytes (Impala, older Spark, Parquet's ENUM)."""
    try:
        return data if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return data


def _number(value: decimal.Decimal, kind: pa.DataType) -> int | float:
    number = float(value)
    return int(value) if kind.scale <= 0 or (number != value and value == value.to_integral_value()) else number


def _shortest(value: float, kind: pa.DataType) -> float:
    """0.1 for the float32 or float16 that lies next to it: what its writer would print."""
    code = "f" if kind.bit_width == 32 else "e"
    stored = struct.pack(code, value)
    for digits in range(3, 9):
        if struct.pack(code, shorter := float(f"{value:.{digits}g}")) == stored:
            return shorter
    return value


def _time(value: datetime.datetime, kind: pa.DataType) -> str:
    """Arrow's JSON reader, which `datasets` uses, makes timestamps of whole seconds of texts such as `2024-01-31`."""
    day = kind == _SECONDS and value.time() == datetime.time()
    return (value.date() if day else value).isoformat()


def _seconds(value: datetime.timedelta, kind: pa.DataType) -> int | float:
    seconds = value.total_seconds()
    return int(seconds) if seconds.is_integer() else seconds


def _any(*kinds: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: any(is_kind(kind) for is_kind in kinds)


_SECONDS = pa.timestamp("s")
_OF_EXTENSIONS: dict[str, Callable[[Any], Any]] = {
    "arrow.json": parse_json,
    "arrow.bool8": bool,
    "arrow.uuid": lambda data: str(uuid.UUID(bytes=data)),
}
_NESTED: list[tuple[Callable[[pa.DataType], bool], Callable[[Any, Feature], list[Any]]]] = [
    (types.is_struct, _structs),
    (types.is_map, _maps),
    (_any(types.is_list, types.is_large_list, types.is_fixed_size_list), _lists),
    (_any(types.is_list_view, types.is_large_list_view), _list_views),
    (types.is_dictionary, lambda array, feature: values(array.dictionary_decode(), feature)),
    (types.is_run_end_encoded, lambda array, feature: values(pc.run_end_decode(array), feature)),
    (types.is_union, _unions),
]
_LEAVES: list[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType], Any]]] = [
    (_any(types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view), _text),
    (types.is_decimal, _number),
    (_any(types.is_float32, types.is_float16), _shortest),
    (types.is_timestamp, _time),
    (_any(types.is_date, types.is_time), lambda value, kind: value.isoformat()),
    (types.is_duration, _seconds),
]
