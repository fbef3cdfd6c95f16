"""Arrow columns mean what their writer meant: logical types are read, and what storage adds is left out."""

import datetime
import decimal
import io
import json
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.prompts.sources.columns import features, rows_of, values

LONG = 123456789012345678901234567890


def through(array, kind):
    """The array as a file gives it back."""
    sink = io.BytesIO()
    table = pa.table({"x": array})
    if kind == "parquet":
        pq.write_table(table, sink)
        return pq.read_table(sink).column("x").combine_chunks()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all().column("x").combine_chunks()


def json_array(texts):
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["a", None], pa.large_string()), ["a", None]),
        (pa.array(["a", None], pa.string_view()), ["a", None]),
        (pa.array([b"caf\xc3\xa9", b"\x89PNG", None]), ["café", b"\x89PNG", None]),
        (pa.array([b"text"], pa.large_binary()), ["text"]),
        (pa.array([b"four", b"\0\0\3\0"], pa.binary(4)), ["four", b"\0\0\3\0"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array([decimal.Decimal(LONG), None], pa.decimal128(38, 0)), [LONG, None]),
        (pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00")], pa.decimal128(5, 2)), [1.5, 2.0]),
        (pa.array([0.1, 1e20, None], pa.float32()), [0.1, 1e20, None]),
        (pa.array([0.1, 3.0], pa.float64()), [0.1, 3.0]),
        (pa.array([2**63, 2**64 - 1], pa.uint64()), [2**63, 2**64 - 1]),
        (pa.array([datetime.date(2024, 1, 31), None]), ["2024-01-31", None]),
        (pa.array([datetime.datetime(2024, 1, 31, 12, 5)], pa.timestamp("us")), ["2024-01-31T12:05:00"]),
        (pa.array([datetime.datetime(2024, 1, 31)], pa.timestamp("ms")), ["2024-01-31T00:00:00"]),
        (pa.array([1706702700000000123], pa.timestamp("ns", "UTC")), ["2024-01-31T12:05:00+00:00"]),
        (pa.array([datetime.time(12, 5)]), ["12:05:00"]),
        (pa.array([[("a", 1), ("b", None)], [], None], pa.map_(pa.string(), pa.int64())), [{"a": 1, "b": None}, {}, None]),
        (pa.array([[(1, "x")]], pa.map_(pa.int32(), pa.string())), [{"1": "x"}]),
        (pa.array([[1, None], None, []], pa.list_(pa.int64())), [[1, None], None, []]),
        (pa.array([[1, 2], None], pa.large_list(pa.int64())), [[1, 2], None]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), [[1, 2], [3, 4]]),
        (json_array(['{"a": [1, null]}', f'{{"n": {LONG}}}', '"text"', "null", None]),
         [{"a": [1, None]}, {"n": LONG}, "text", None, None]),
        (pa.ListArray.from_arrays([0, 2, 2, 3], json_array(['"a"', '[{"text": "b"}]', "1"])), [["a", [{"text": "b"}]], [], [1]]),
    ],
    ids=str,
)  # fmt: skip
def test_logical_types(array, expected, kind):
    assert values(through(array, kind)) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([datetime.timedelta(seconds=90)]), [90]),
        (pa.array([datetime.timedelta(milliseconds=1500)], pa.duration("ns")), [1.5]),
        (pa.array([0.1, 0.5], pa.float16()), [0.1, 0.5]),
        (pa.array([datetime.datetime(2024, 1, 31)], pa.timestamp("s")), ["2024-01-31"]),
        (pa.array([datetime.datetime(2024, 1, 31, 12, 5)], pa.timestamp("s")), ["2024-01-31T12:05:00"]),
        (pa.array([[1, 2], None], pa.list_view(pa.int64())), [[1, 2], None]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), ["a", "a", "b"]),
        (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, None], pa.int8())), [False, True, None]),
        (pa.UnionArray.from_dense(pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()),
                                  [pa.array(["a", "b"]), pa.array([decimal.Decimal(LONG)], pa.decimal128(38, 0))]),
         ["a", LONG, "b"]),
        (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([uuid.UUID(int=7).bytes], pa.binary(16))), [str(uuid.UUID(int=7))]),
    ],
    ids=str,
)  # fmt: skip
def test_types_that_arrow_alone_has(array, expected):
    assert values(array) == expected


def test_binary_of_parquet_files_without_logical_types():
    """Impala and older Spark write texts so, and `ENUM` is read so."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": pa.array([b"Why?"])}), sink, store_schema=False)
    assert values(pq.read_table(sink).column("prompt").combine_chunks()) == ["Why?"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_keys_that_other_rows_lent_are_absent(kind):
    calls = [
        {"name": "add", "arguments": {"a": 2, "b": 3}},
        {"name": "weather", "arguments": {"city": "Oslo"}},
        {"name": "both", "arguments": {"a": 0, "city": ""}},
        None,
    ]
    assert values(through(pa.array(calls), kind)) == calls


def test_an_object_without_keys_stays_one():
    calls = [{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "none"}]
    assert values(through(pa.array(calls), "parquet")) == calls


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_nulls_that_somebody_wrote_stay(kind):
    """In lists, in JSON, and where a key is null in all rows: then none lent it to the others."""
    schemas = [
        {"city": {"type": ["string", "null"], "default": None, "enum": ["Oslo", None]}},
        {"city": {"type": ["string"], "default": None, "enum": [None]}},
        {"unit": {"const": None}},
    ]
    assert values(through(pa.array(schemas), kind)) == schemas
    texts = json_array(['{"default": null}', "null", None])
    rows = pa.StructArray.from_arrays([pa.array(["a", "b", "c"]), texts], names=["name", "schema"])
    expected = [{"name": "a", "schema": {"default": None}}, {"name": "b", "schema": None}, {"name": "c"}]
    assert values(through(rows, kind)) == expected


def test_a_key_of_nulls_goes_where_its_row_lacks_others():
    arguments = pa.array([{"a": 1, "note": None}, {"b": 2}])
    assert values(arguments) == [{"a": 1}, {"b": 2}]
    assert values(pa.array([{"a": 1, "note": None}, {"a": 2, "note": None}])) == [
        {"a": 1, "note": None},
        {"a": 2, "note": None},
    ]


def test_slices_are_read_as_slices():
    """A batch is a slice of a larger one: offsets of lists, maps and structs begin anywhere."""
    rows = [
        {"m": [{"role": "user", "tags": [str(n)] * (n % 3)}] * (n % 4), "p": [("k", n)] * (n % 2)} for n in range(50)
    ]
    kind = pa.struct([
        ("m", pa.list_(pa.struct([("role", pa.string()), ("tags", pa.list_(pa.string()))]))),
        ("p", pa.map_(pa.string(), pa.int64())),
    ])  # fmt: skip
    array = pa.array(rows, kind)
    expected = [{"m": row["m"], "p": dict(row["p"])} for row in rows]
    for start, length in ((0, 50), (7, 13), (49, 1), (20, 0)):
        assert values(array.slice(start, length)) == expected[start : start + length]
        assert values(pa.array([None, *rows], kind).slice(start + 1, length)) == expected[start : start + length]


def test_class_labels_are_their_names():
    """`datasets` stores the number of a class, and its name in the schema."""
    meta = {"info": {"features": {
        "answer": {"names": ["A", "B"], "_type": "ClassLabel"},
        "votes": {"feature": {"names": ["no", "yes"], "_type": "ClassLabel"}, "_type": "List"},
        "meta": {"lang": {"names": ["de", "en"], "_type": "ClassLabel"}},
    }}}  # fmt: skip
    rows = [
        {"answer": 1, "votes": [0, 1, None], "meta": {"lang": 0}},
        {"answer": None, "votes": [-1], "meta": {"lang": 1}},
    ]
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(meta)})
    (batch,) = table.to_batches()
    assert rows_of(batch, features(table.schema)) == [
        {"answer": "B", "votes": ["no", "yes", None], "meta": {"lang": "de"}},
        {"answer": None, "votes": [-1], "meta": {"lang": "en"}},
    ]


@pytest.mark.parametrize(
    "metadata", [None, {b"huggingface": b"{"}, {b"huggingface": b'{"info": []}'}, {b"huggingface": b"[]"}]
)
def test_other_metadata_says_nothing(metadata):
    assert features(pa.schema([("a", pa.int64())], metadata=metadata)) == {}


def test_struct_with_two_fields_of_one_name_is_refused():
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ValueError, match="two fields of one name: a, a"):
        values(twice)
