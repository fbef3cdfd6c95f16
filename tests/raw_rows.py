"""Rows of bytes, as a source of that name gives them."""

import io

import pyarrow.parquet as pq

from scripts.lib.prompts.sources.rows import read_file


def read(name, data):
    return list(read_file(name, lambda: io.BytesIO(data)))


def values(name, data):
    return [row.value for row in read(name, data)]


def parquet(table):
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


def arrow(table, opener):
    sink = io.BytesIO()
    with opener(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
