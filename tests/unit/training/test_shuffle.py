import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.training.shuffle import Buckets, ahead, order_keys, share_keys

SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False), ("dataset", pa.string()), ("age", pa.int64())])


def shuffled(folder, batches, buckets, seed=0):
    """Rows `(id, age)` that come out, and those superseded by dataset."""
    spill = Buckets(folder, SCHEMA, buckets, seed)
    for batch in batches:
        spill.add(batch)
    kept, superseded = [], []
    for new, old in spill.sorted():
        kept += new.to_pylist()
        superseded += old.to_pylist()
    return [(row["id"], row["age"]) for row in kept], superseded


def batches_of(ids, size):
    rows = [{"id": one, "dataset": "d", "age": age} for age, one in enumerate(ids)]
    return [pa.RecordBatch.from_pylist(rows[at : at + size], SCHEMA) for at in range(0, len(rows), size)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=4), max_size=60), st.integers(1, 40), st.integers(1, 9))
def test_newest_of_each_id_comes_out_sorted_by_key(tmp_path_factory, ids, size, buckets):
    folder = tmp_path_factory.mktemp("spill")
    kept, superseded = shuffled(folder, batches_of(ids, size), buckets)
    newest = {one: age for age, one in enumerate(ids)}
    assert dict(kept) == newest
    assert len(kept) == len(newest)
    assert len(superseded) == len(ids) - len(newest)
    keys = order_keys(pa.array([one for one, _ in kept], pa.string()), 0)
    assert (np.diff(keys.astype(object)) >= 0).all()
    assert list(folder.iterdir()) == []


def test_order_depends_on_the_seed_alone(tmp_path):
    ids = [f"{number:032x}" for number in range(500)]
    outcomes = []
    for number, (buckets, order) in enumerate([(1, ids), (16, ids[::-1]), (3, ids[250:] + ids[:250])]):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes.append([one for one, _ in shuffled(folder, batches_of(order, 64), buckets)[0]])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (tmp_path / "seed").mkdir()
    other = [one for one, _ in shuffled(tmp_path / "seed", batches_of(ids, 64), 4, seed=1)[0]]
    assert sorted(other) == sorted(outcomes[0])
    assert other != outcomes[0]


def test_keys_are_pinned_and_independent():
    """A corpus made today must be the same one after an upgrade of a library."""
    ids = pa.array(["0" * 32, "é/1"])
    assert order_keys(ids, 0).tolist() == [17673926672939710863, 14848314001612007015]
    many = pa.array([f"{number:032x}" for number in range(20_000)])
    order, share = order_keys(many, 7) / 2**64, share_keys(many, 7) / 2**64
    assert abs(order.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(order, share)[0, 1]) < 0.03


def test_reading_ahead_keeps_order_and_passes_errors_on():
    def items():
        yield from range(3)
        raise ValueError("broken")

    taken = []
    with pytest.raises(ValueError, match="broken"):
        for item in ahead(items()):
            taken.append(item)
    assert taken == [0, 1, 2]
