import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.core import records
from scripts.lib.training.counts import tokens_per_row

LIST = records.SAMPLE_SCHEMA.field("input_ids").type
MASK = records.SAMPLE_SCHEMA.field("loss_mask").type


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=20), st.integers(0, 5))
def test_counts_per_row(masks, skip):
    table = pa.table({"input_ids": pa.array(masks, LIST), "loss_mask": pa.array(masks, MASK)}).slice(skip)
    lengths, sums = tokens_per_row(table)
    assert lengths.tolist() == [len(mask) for mask in masks[skip:]]
    assert sums.tolist() == [sum(mask) for mask in masks[skip:]]


def test_counts_of_a_mask_longer_than_int8():
    mask = np.ones(1000, np.int8)
    table = pa.table({"input_ids": pa.array([mask.tolist()], LIST), "loss_mask": pa.array([mask.tolist()], MASK)})
    assert tokens_per_row(table)[1].tolist() == [1000]
