import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.training.inputs import base_files, batches
from tests.corpora import TARGET, config, corpus, rows_of, sample, shard


def foreign(tmp_path, **columns):
    path = tmp_path / "base/data/train-00000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return tmp_path / "base"


def merged(tmp_path, base):
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample(0)])]
    manifest = corpus(tmp_path, config(base=str(base)), paths)
    return manifest, [row for row in rows_of(tmp_path / "training") if row.dataset != "alpha"]


IDS = [[1, 2, 3], [4, 5], [4, 5]]
MASK = [[0, 1, 1], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("ids_type", "mask_type"),
    [
        (pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.large_list(pa.uint32()), pa.list_(pa.bool_())),
        (pa.list_(pa.int32()), pa.large_list(pa.uint8())),
    ],
)
def test_only_ids_and_masks_are_needed(tmp_path, ids_type, mask_type):
    base = foreign(tmp_path, input_ids=pa.array(IDS, ids_type), loss_mask=pa.array(MASK).cast(mask_type))
    _, rows = merged(tmp_path, base)
    assert sorted((row.input_ids, row.loss_mask) for row in rows) == sorted(zip(IDS, MASK))
    assert {(row.dataset, row.ids_origin, row.outcome) for row in rows} == {("base", "given", "kept")}
    # Equal ids under another mask are another sample.
    assert len({row.id for row in rows}) == 3


def test_fixed_length_samples(tmp_path):
    base = foreign(
        tmp_path,
        input_ids=pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)),
        loss_mask=pa.array([[0, 1], [1, 1]], pa.list_(pa.int8(), 2)),
    )
    _, rows = merged(tmp_path, base)
    assert sorted(row.input_ids for row in rows) == [[1, 2], [3, 4]]


def test_ids_without_a_name_depend_on_content_not_on_place(tmp_path):
    first = merged(tmp_path / "a", foreign(tmp_path / "a", input_ids=IDS, loss_mask=MASK))[1]
    second = merged(tmp_path / "b", foreign(tmp_path / "b", input_ids=IDS[::-1], loss_mask=MASK[::-1]))[1]
    assert {row.id for row in first} == {row.id for row in second}


def test_known_columns_are_taken_and_others_named(tmp_path):
    base = foreign(
        tmp_path,
        id=["one", "two", "three"],
        dataset=["x", None, "y"],
        input_ids=IDS,
        loss_mask=MASK,
        seq_len=[3, 2, 2],
    )
    manifest, rows = merged(tmp_path, base)
    assert {(row.id, row.dataset) for row in rows} == {("one", "x"), ("two", "base"), ("three", "y")}
    assert any("seq_len" in note for note in manifest.notes)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": IDS}, r"train-00000\.parquet: has no column `loss_mask`, it has input_ids"),
        ({"input_ids": IDS, "loss_mask": [[0, 1, 1], [0], [1, 1]]}, r":1: has 2 ids but 1 mask values"),
        ({"input_ids": IDS, "loss_mask": [[0, 1, 2], [0, 1], [1, 1]]}, r":0: has the mask value 2"),
        (
            {"input_ids": [[1, 2, 3], [4, 5], [4, -100]], "loss_mask": MASK},
            r":2: has the token id -100, outside of 0 to 999",
        ),
        ({"input_ids": [[1, 2, 3], [], [4, 5]], "loss_mask": [[0, 1, 1], [], [1, 1]]}, r":1: has no tokens"),
        ({"input_ids": [[1, 2, 3], None, [4, 5]], "loss_mask": MASK}, r":1: `input_ids` is null"),
        ({"input_ids": [[1, 2, 3], [4, None], [4, 5]], "loss_mask": MASK}, r"`input_ids` holds a null"),
        ({"input_ids": [[1, 2, 2**40], [4, 5], [4, 5]], "loss_mask": MASK}, r"column `input_ids` of type"),
        ({"input_ids": [[1, 2, 3], [4, 1000], [4, 5]], "loss_mask": MASK}, r":1: has the token id 1000, outside of"),
        ({"input_ids": ["a", "b", "c"], "loss_mask": MASK}, r"column `input_ids` of type string"),
        ({"id": ["a", None, "c"], "input_ids": IDS, "loss_mask": MASK}, r":1: `id` is null"),
    ],
)
def test_bad_base_rows_are_named(tmp_path, columns, message):
    base = foreign(tmp_path, **columns)
    with pytest.raises(UserError, match=message):
        merged(tmp_path, base)
    assert not (tmp_path / "training").exists()


def test_another_tokenizer_is_refused_another_template_is_noted(tmp_path):
    base = shard(tmp_path / "base/part.parquet", [sample(1, "old")], TARGET | {"template_hash": "other"})
    manifest, _ = merged(tmp_path, base.parent)
    assert manifest.target == TARGET
    assert any("template_hash: 'other' -> " in note for note in manifest.notes)
    shard(base, [sample(1, "old")], TARGET | {"tokenizer_hash": "other"})
    with pytest.raises(
        UserError, match=r"part\.parquet: its ids come from another tokenizer .*tokenizer_hash: 'other' ->"
    ):
        merged(tmp_path, base.parent)


def test_a_target_without_a_tokenizer_s_hash_is_noted(tmp_path):
    told = {name: value for name, value in TARGET.items() if name != "tokenizer_hash"}
    base = shard(tmp_path / "base/part.parquet", [sample(1, "old")], told)
    manifest, _ = merged(tmp_path, base.parent)
    assert any("tokenizer_hash: None -> " in note for note in manifest.notes)


def test_folders_without_a_corpus(tmp_path):
    with pytest.raises(UserError, match=r"merge\.base: .*nowhere: no such folder"):
        base_files(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no \.parquet file"):
        base_files(tmp_path)


def test_a_damaged_corpus_of_ours_is_refused(tmp_path):
    corpus(tmp_path)
    part = tmp_path / "training/part-00000.parquet"
    part.chmod(0o644)
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    with pytest.raises(UserError, match=r"part-00000\.parquet: its sha256 differs"):
        base_files(tmp_path / "training")


def test_batches_follow_memory_not_rows(tmp_path, monkeypatch):
    corpus(tmp_path)
    (source,) = base_files(tmp_path / "training")
    assert len(list(batches(source))) == 1
    assert source.memory == pytest.approx(sum(batch.nbytes for batch in batches(source)), rel=0.5)
    monkeypatch.setattr("scripts.lib.training.inputs.BATCH_BYTES", source.memory // 8)
    assert 8 <= len(list(batches(source))) <= 10


def test_shards_of_an_earlier_version_are_merged_with_those_of_today(tmp_path):
    """Nobody validates anew what was validated: what the columns of today would say is filled in."""
    paths = [
        shard(tmp_path / f"validated/alpha/{name}.parquet", [sample(number)]) for number, name in enumerate(["0", "1"])
    ]
    table = pq.read_table(paths[0])
    turns = pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", "reasoning", "tool_calls")]))
    rows = [
        [{key: turn[key] for key in ("role", "content", "reasoning", "tool_calls")} for turn in row]
        for row in table["messages"].to_pylist()
    ]
    table = table.set_column(table.schema.get_field_index("messages"), "messages", pa.array(rows, turns))
    pq.write_table(table.drop_columns(["template_kwargs"]), paths[0])
    corpus(tmp_path, config(), paths)
    merged_rows = {row.id: row for row in rows_of(tmp_path / "training")}
    assert merged_rows == {sample(number).id: sample(number) for number in range(2)}
