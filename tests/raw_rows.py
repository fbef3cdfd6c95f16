"""Rows of bytes, as a source of that name gives them."""

import io

from scripts.lib.prompts.sources.rows import read_file


def read(name, data):
    return list(read_file(name, lambda: io.BytesIO(data)))


def values(name, data):
    return [row.value for row in read(name, data)]
