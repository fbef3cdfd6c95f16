import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core import durable, records
from scripts.lib.core.errors import UserError
from scripts.lib.training.manifest import read_manifest, row_problems, token_counts, verify
from tests.corpora import config, corpus

LIST = records.SAMPLE_SCHEMA.field("input_ids").type
MASK = records.SAMPLE_SCHEMA.field("loss_mask").type


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=20), st.integers(0, 5))
def test_counts_per_row(masks, skip):
    table = pa.table({"input_ids": pa.array(masks, LIST), "loss_mask": pa.array(masks, MASK)}).slice(skip)
    lengths, sums = token_counts(table)
    assert lengths.tolist() == [len(mask) for mask in masks[skip:]]
    assert sums.tolist() == [sum(mask) for mask in masks[skip:]]


def test_bad_rows_are_found_by_number():
    table = pa.table(
        {
            "input_ids": pa.array([[1], [], [1, 2], [1, 99], [5]], LIST),
            "loss_mask": pa.array([[1], [], [1], [0, 1], [3]], MASK),
        }
    )
    assert row_problems(table, 50) == [
        (1, "has no tokens"),
        (2, "has 2 ids but 1 mask values"),
        (4, "has the mask value 3, only 0 and 1 are known"),
        (3, "has the token id 99, outside of 0 to 49"),
    ]
    assert row_problems(table.slice(0, 1), None) == []


@pytest.fixture
def training(tmp_path):
    corpus(tmp_path, config(rows_per_part=30))
    for path in (tmp_path / "training").iterdir():
        path.chmod(0o644)
    return tmp_path / "training"


def rewrite(training, change):
    """Change the rows of the first part and let the manifest's bytes and sha256 fit: only the rows tell."""
    path = training / "part-00000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    edit(training, lambda m: m["parts"][0].update(sha256=durable.sha256_file(path), bytes=path.stat().st_size))


def edit(training, change):
    manifest = json.loads((training / "manifest.json").read_text())
    change(manifest)
    durable.write_json(training / "manifest.json", manifest)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: flip_a_bit(t / "part-00001.parquet"), "part-00001.parquet: its sha256 differs"),
        (lambda t: (t / "part-00001.parquet").unlink(), "part-00001.parquet: no such file"),
        (lambda t: (t / "part-00001.parquet").write_bytes(b"short"), "part-00001.parquet: has 5 bytes"),
        (lambda t: (t / "part-9.parquet").write_bytes(b""), "part-9.parquet: is not in the manifest"),
        (lambda t: rewrite(t, lambda rows: rows.append(rows[-1])), "is there twice"),
        (lambda t: rewrite(t, lambda rows: rows.reverse()), "part-00000.parquet:1: id"),
        (lambda t: rewrite(t, lambda rows: rows.pop()), "part-00000.parquet: holds 29 rows, the manifest says 30"),
        (lambda t: rewrite(t, lambda rows: rows[3]["loss_mask"].pop()), "part-00000.parquet:3: has"),
        (lambda t: rewrite(t, lambda rows: rows[3]["input_ids"].__setitem__(0, 1000)), ":3: has the token id 1000"),
        (lambda t: rewrite(t, lambda rows: rows[0].update(dataset="gamma")), "dataset gamma is in the parts but not"),
        (lambda t: edit(t, lambda m: m["totals"].update(tokens=1)), "the manifest says 1"),
        (lambda t: edit(t, lambda m: m["parts"][0].update(tokens=1)), "tokens, the manifest says 1"),
        (
            lambda t: edit(t, lambda m: m["datasets"]["beta"]["dropped"].update(weight=2)),
            "beta: rows and dropped don't",
        ),
        (lambda t: edit(t, lambda m: m["datasets"].pop("beta")), "dataset beta is in the parts but not"),
        (lambda t: edit(t, lambda m: m["inputs"].pop()), "the inputs hold 60 rows"),
    ],
)
def test_verify_finds_it(training, spoil, message):
    assert verify(training)[1] == []
    spoil(training)
    problems = verify(training)[1]
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ('{"schema_version": 99}', "has schema version 99, this code reads 1"),
        ('{"schema_version": 1}', "not a manifest of ours"),
        ("[]", "not a JSON object"),
    ],
)
def test_unreadable_manifests(tmp_path, text, message):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path)


def test_counts_of_a_mask_longer_than_int8():
    mask = np.ones(1000, np.int8)
    table = pa.table({"input_ids": pa.array([mask.tolist()], LIST), "loss_mask": pa.array([mask.tolist()], MASK)})
    assert token_counts(table)[1].tolist() == [1000]
