"""The same rows in any container give the same prompts, down to the JSON text of tools and calls."""

import bz2
import csv
import gzip
import io
import json

import pyarrow as pa
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.config.model import Fields
from scripts.lib.prompts.selection import prompt_id
from scripts.lib.prompts.sources.formats import to_conversation
from tests.raw_rows import arrow, parquet, values


def in_order(keys):
    """Some of the keys, in the order of the columns: Arrow knows no other."""
    return st.fixed_dictionaries({}, optional=keys).map(lambda found: {key: found[key] for key in keys if key in found})


# A key has one type in all rows, as Arrow wants it; which keys a row has differs.
ARGUMENTS = {
    "a_text": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
    "b_number": st.integers(-(2**63), 2**63 - 1),
    "c_share": st.floats(allow_nan=False, allow_infinity=False),
    "d_flag": st.booleans(),
    "e_list": st.lists(st.none() | st.sampled_from(["x", "null", ""]), max_size=3),
    "f_place": in_order({"lat": st.floats(0, 90), "name": st.sampled_from(["Oslo", "Rome"])}),
}
FULL = {
    "a_text": "",
    "b_number": 0,
    "c_share": 0.5,
    "d_flag": False,
    "e_list": ["x"],
    "f_place": {"lat": 1.5, "name": "Oslo"},
}
FULL_PROPERTY = {"type": "string", "description": "all", "enum": ["x"]}


PROPERTY = in_order(
    {
        "type": st.sampled_from(["string", "integer"]),
        "description": st.sampled_from(["what", ""]),
        "enum": st.lists(st.sampled_from(["x", None]), min_size=1, max_size=2),
    }
)


def conversation(arguments, properties):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    tool = {"name": "look", "parameters": {"type": "object", "properties": properties, "required": list(properties)}}
    return {
        "messages": [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "Seven."},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


def as_json(rows):
    """Columns of the type `arrow.json`, as `datasets` writes what has no one type."""
    texts = {name: pa.array([json.dumps(row[name]) for row in rows]) for name in rows[0]}
    columns = [pa.ExtensionArray.from_storage(pa.json_(), column) for column in texts.values()]
    return pa.table(columns, names=list(texts))


def cells(rows, delimiter):
    sink = io.StringIO()
    writer = csv.writer(sink, delimiter=delimiter)
    writer.writerow(rows[0])
    writer.writerows([json.dumps(value, ensure_ascii=False) for value in row.values()] for row in rows)
    return sink.getvalue().encode()


def containers(rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    return {
        "a.json": json.dumps(rows).encode(),
        "b.json": json.dumps(rows, indent=1, ensure_ascii=False).encode(),
        "c.jsonl.gz": gzip.compress(lines),
        "d.jsonl.zst": zstandard.compress(lines),
        "e.jsonl.bz2": bz2.compress(lines),
        "f.parquet": parquet(table),
        "g.arrow": arrow(table, pa.ipc.new_stream),
        "h.feather": arrow(table, pa.ipc.new_file),
        "i.parquet": parquet(as_json(rows)),
        "j.arrow": arrow(as_json(rows), pa.ipc.new_stream),
        "k.csv": cells(rows, ","),
        "l.csv": cells(rows, ";"),
        "m.tsv": cells(rows, "\t"),
    }, lines


def prompts(name, data):
    conversations = [to_conversation(value, "auto", Fields()) for value in values(name, data)]
    return [(prompt_id("d", one), one.messages, one.tools) for one in conversations]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(in_order(ARGUMENTS), in_order({"p": PROPERTY, "q": PROPERTY})), max_size=6))
def test_any_rows_are_the_same_in_all_containers(rows):
    first = conversation(FULL, {"p": FULL_PROPERTY, "q": FULL_PROPERTY})
    found, lines = containers([first] + [conversation(*one) for one in rows])
    expected = prompts("rows.jsonl", lines)
    for name, data in found.items():
        assert prompts(name, data) == expected, name
