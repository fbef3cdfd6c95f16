import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.config.model import Validation
from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Reject, Sample
from scripts.lib.training.base_gates import BaseGates, Limits, Tokens, limits_of
from scripts.lib.training.inputs import base_files, batches
from scripts.lib.training.merge import merge
from scripts.lib.training.verify import verify
from scripts.lib.validated.gates import Gates
from tests.corpora import TARGET, config, corpus, rows_of, sample, shard, shards, summary_of


def foreign(tmp_path, **columns):
    path = tmp_path / "base/data/train-00000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return tmp_path / "base"


def merged(tmp_path, base):
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample(0)])]
    manifest = corpus(tmp_path, config(base=str(base)), paths)
    return manifest, [row for row in rows_of(tmp_path / "training") if row.dataset != "alpha"]


IDS = [[1, 2, 3], [4, 5, 6], [4, 5, 6]]
MASK = [[0, 1, 1], [0, 1, 1], [1, 1, 0]]


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


def test_masks_of_whole_floats_are_masks(tmp_path):
    """Losses are often weighted by floats; 0.5 is no mask (and is not cut down to 0), 1.0 is."""
    base = foreign(tmp_path, input_ids=IDS, loss_mask=pa.array(MASK).cast(pa.list_(pa.float32())))
    _, rows = merged(tmp_path, base)
    assert sorted(row.loss_mask for row in rows) == sorted(MASK)


def test_fixed_length_samples(tmp_path):
    base = foreign(
        tmp_path,
        input_ids=pa.array([[1, 2, 3], [3, 4, 5]], pa.list_(pa.int64(), 3)),
        loss_mask=pa.array([[0, 1, 1], [1, 1, 0]], pa.list_(pa.int8(), 3)),
    )
    _, rows = merged(tmp_path, base)
    assert sorted(row.input_ids for row in rows) == [[1, 2, 3], [3, 4, 5]]


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
        ({"input_ids": ["a", "b", "c"], "loss_mask": MASK}, r"column `input_ids` of type string"),
        ({"input_ids": IDS, "loss_mask": [[0.0, 0.5, 1.0]] * 3}, r"column `loss_mask` of type list<.*double>"),
        ({"input_ids": IDS, "loss_mask": MASK, "messages": [1, 2, 3]}, r"column `messages` of type int64"),
    ],
)
def test_columns_that_are_no_tokens_are_named(tmp_path, columns, message):
    base = foreign(tmp_path, **columns)
    with pytest.raises(UserError, match=message):
        merged(tmp_path, base)
    assert not (tmp_path / "training").exists()


GOOD = [([number, number + 1, number + 2], [0, 1, 1]) for number in range(10, 60)]
LOOP = list(range(30)) + [7, 8, 9] * 20


LIMITS = Limits(vocab_size=1000, max_length=200, bos_id=3, eos_ids=(2,))


def read_base(tmp_path, rows, **columns):
    """The rows that get in, and the gates that let them."""
    ids, masks = zip(*rows)
    base = foreign(tmp_path, input_ids=list(ids), loss_mask=list(masks), **columns)
    gates = BaseGates(LIMITS)
    return [row for batch in batches(base_files(base)[0], gates) for row in batch.to_pylist()], gates


@pytest.mark.parametrize(
    ("ids", "mask", "check", "told"),
    [
        ([1, 2, 4], [0, 1], "lengths", "3 ids, 2 mask values"),
        ([], [], "lengths", "0 ids, 0 mask values"),
        ([1, 2, 4], [], "lengths", "3 ids, 0 mask values"),
        ([1, 2, 4], [0, 1, 2], "lengths", "the mask holds other values than 0 and 1"),
        ([1, 2, 4], [0, 1, -1], "lengths", "the mask holds other values than 0 and 1"),
        ([1, 2, 4], [0, 1, 256], "lengths", "the mask holds other values than 0 and 1"),
        ([1, 2, -100], [0, 1, 1], "id_range", "holds an id outside of 0 to 999"),
        ([1, 2, 1000], [0, 1, 1], "id_range", "holds an id outside of 0 to 999"),
        ([1, 2, 2**40], [0, 1, 1], "id_range", "holds an id outside of 0 to 999"),
        ([5] * 201, [0] * 199 + [1, 1], "max_length", "201 tokens of at most 200"),
        ([5] * 1_000_000, [0, *[1] * 999_999], "max_length", "1000000 tokens of at most 200"),
        ([1, 2, 4], [0, 0, 0], "no_supervised_tokens", "the mask is all zeros"),
        ([1, 2, 4], [1, 1, 1], "all_supervised", "the mask is all ones"),
        ([1, 2, 4, 5], [0, 1, 0, 1], "adjacent_supervised_tokens", "no two supervised tokens stand side by side"),
        ([3, 3, 4, 5], [0, 0, 1, 1], "bos", "2 BOS tokens"),
        (LOOP, [0] * 10 + [1] * 80, "repetition", "repeats of 3 ids"),
        ([*LOOP, 2], [0] * 10 + [1] * 81, "repetition", "repeats of 3 ids"),
        (None, [0, 1, 1], "null", "a null"),
        ([1, 2, 4], None, "null", "a null"),
        ([1, None, 4], [0, 1, 1], "null", "a null"),
        ([1, 2, 4], [0, 1, None], "null", "a null"),
    ],
)
def test_rows_that_no_shard_could_hold_stay_out_of_the_corpus(tmp_path, ids, mask, check, told):
    rows, gates = read_base(tmp_path, [*GOOD[:20], (ids, mask), *GOOD[20:]])
    assert [row["input_ids"] for row in rows] == [one for one, _ in GOOD]
    assert gates.refused == {("base", check): 1}
    assert f"train-00000.parquet:20: {told}" in gates.examples[check] or told in gates.examples[check]
    assert gates.rows == 51


@pytest.mark.parametrize(
    ("columns", "check"),
    [
        ({"messages": pa.array([[{"role": "user", "content": "q"}], [None], []])}, "null"),
        ({"messages": pa.array([[{"role": "user", "content": "q"}], [{"role": "user", "content": None}], []])}, "null"),
        ({"flags": pa.array([["a"], [None], []])}, "null"),
        ({"tools": ["[]", "search, browse", None]}, "no_json"),
        ({"template_kwargs": ['{"a": 1}', "7", None]}, "no_json"),
    ],
)
def test_what_stands_beside_the_tokens_is_what_it_says(tmp_path, columns, check):
    rows, gates = read_base(tmp_path, GOOD[:3], **columns)
    assert [row["input_ids"] for row in rows] == [GOOD[0][0], GOOD[2][0]]
    assert gates.refused == {("base", check): 1}


def test_a_file_of_which_nothing_may_enter(tmp_path):
    rows, gates = read_base(tmp_path, [([], []), ([1, 2], [0, 0]), ([1], None)])
    assert rows == []
    assert gates.refused.total() == 3


ODD = {
    "int": pa.array([1, 2, 3]),
    "text": pa.array(["a", "b", "c"]),
    "bytes": pa.array([b"a", b"\xff", b"c"]),
    "null": pa.nulls(3),
    "float": pa.array([1.5, 2.0, None]),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
    "texts": pa.array([["1", "x", "3"]] * 3),
    "nulls": pa.array([[None] * 3] * 3),
    "lists": pa.array([[[1], [2]]] * 3),
    "struct": pa.array([{"a": 1}] * 3),
    "map": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
    "nan": pa.array([[0.0, float("nan"), 1.0]] * 3),
    "huge": pa.array([[2**63 + 5, 1, 2]] * 3, pa.list_(pa.uint64())),
    "fixed with null": pa.array([[0, 1, 1], None, [0, 1, 1]], pa.list_(pa.int8(), 3)),
    "empty": pa.array([[]] * 3, pa.list_(pa.int64())),
    "messages": pa.array([[{"role": 1, "content": 2}]] * 3),
}


@pytest.mark.parametrize("column", records.SAMPLE_SCHEMA.names)
@pytest.mark.parametrize("values", ODD.values(), ids=ODD.keys())
def test_a_column_of_any_type_is_read_refused_or_named(tmp_path, column, values):
    """And never ends in a traceback, nor in rows that no stage after this can read."""
    path = tmp_path / "base/x.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"input_ids": IDS, "loss_mask": MASK} | {column: values}), path)
    gates = BaseGates(LIMITS)
    try:
        tables = [pa.Table.from_batches([batch]) for batch in batches(base_files(tmp_path / "base")[0], gates)]
    except UserError as error:
        assert f"x.parquet: column `{column}` of type" in str(error)
        return
    rows = [records.from_dict(Sample, row) for table in tables for row in table.to_pylist()]
    assert len(rows) + gates.refused.total() == 3
    records.write_rows(tmp_path / "again.parquet", Sample, rows, {})


def test_a_row_without_an_id_where_others_have_one(tmp_path):
    rows, gates = read_base(tmp_path, GOOD[:3], id=["a", None, "c"], dataset=["x", "x", "y"])
    assert [row["id"] for row in rows] == ["a", "c"]
    assert gates.refused == {("x", "null"): 1}


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-1, 12), max_size=9), st.lists(st.integers(0, 2), max_size=9)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
)
def test_the_gates_are_those_of_validation(rows, adjacent):
    """By the column or one by one, the same row is refused for the same reason."""
    settings = Validation(
        min_supervised_tokens=2, adjacent_supervised_tokens=adjacent, max_length=8, max_period=3, max_repeats=2
    )
    target = SimpleNamespace(
        vocab_size=12, context_length=99, bos_id=3, eos_ids=frozenset([2]), think_close_id=None, tool_ids=frozenset()
    )
    one_by_one = Gates(target, settings)
    told = []
    for number, (ids, mask) in enumerate(rows):
        found = Sample(str(number), "p", "base", ids, mask, "given", "kept")
        told.append(one_by_one.refuse(found))
    facts = {"bos_id": 3, "eos_ids": [2], "context_length": 99}
    gates = BaseGates(limits_of(settings, {"vocab_size": 12}, facts))
    tokens = Tokens(*(pa.array(column, pa.list_(pa.int64())) for column in zip(*rows)))
    keep = gates.keep(tokens, ["base"] * len(rows), str, {})
    assert keep.tolist() == [one is None for one in told]
    assert gates.refused == Counter(("base", one[0]) for one in told if one)


def test_refused_rows_are_counted_in_manifest_and_log_and_many_stop_the_merge(tmp_path):
    rows = [*GOOD, ([1, 2], [0, 0]), ([4, 5], [0, 0]), ([6, 7, 5000], [0, 1, 1])]
    ids, masks = zip(*rows)
    base = foreign(tmp_path, input_ids=list(ids), loss_mask=list(masks))
    said = []
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample(0)])]
    settings = config(base=str(base))
    manifest = merge(settings, paths, summary_of(paths), tmp_path / "training", said.append)
    counted = manifest.datasets["base"]
    assert (counted["read"], counted["from_base"], counted["rows"]) == (53, 53, 50)
    assert counted["dropped"] == {"weight": 0, "superseded": 0, "no_supervised_tokens": 2, "id_range": 1}
    assert any(
        "refused rows of the base: no_supervised_tokens 2 (" in line and "train-00000.parquet:50: the mask is" in line
        for line in said
    )
    assert verify(tmp_path / "training")[1] == []
    assert "merge.base: 3 of 53 rows are left out: no_supervised_tokens 2, id_range 1" in manifest.notes
    settings = config(base=str(base), validation={"max_reject_rate": 0.05})
    with pytest.raises(
        UserError, match=r"merge\.base: 3 of 53 rows \(5\.7%\) are refused: no_supervised_tokens 2 .*max_reject_rate 5%"
    ):
        merge(settings, paths, summary_of(paths), tmp_path / "elsewhere/training", said.append)


def test_the_context_of_the_target_is_the_longest_row(tmp_path):
    (tmp_path / "target").mkdir()
    facts = {"tokenizer_hash": TARGET["tokenizer_hash"], "context_length": 40, "bos_id": None, "eos_ids": [1]}
    (tmp_path / "target/target.json").write_text(json.dumps(facts))
    base = foreign(tmp_path, input_ids=[list(range(41)), list(range(40))], loss_mask=[[0] + [1] * 40, [0] + [1] * 39])
    settings = config(base=str(base), validation={"max_reject_rate": 0.9})
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample(0)])]
    manifest = merge(settings, paths, summary_of(paths), tmp_path / "training", lambda line: None)
    assert manifest.datasets["base"]["dropped"]["max_length"] == 1
    assert manifest.settings["base_gates"]["max_length"] == 40


def test_files_of_one_base_may_differ_in_their_columns(tmp_path):
    data = tmp_path / "base"
    (data / "b/.cache").mkdir(parents=True)
    ids, masks = map(list, zip(*GOOD[:2]))
    pq.write_table(pa.table({"input_ids": pa.array(ids, pa.list_(pa.int64())), "loss_mask": masks}), data / "1.parquet")
    messages = [[{"content": "q", "role": "user"}, {"content": "a", "role": "assistant"}]] * 2
    more, more_masks = map(list, zip(*GOOD[2:4]))
    typed = pa.array(more, pa.large_list(pa.uint16()))
    table = {"loss_mask": more_masks, "messages": messages, "input_ids": typed, "id": [7, 8], "score": [0.5, 0.5]}
    pq.write_table(pa.table(table), data / "b/2.parquet")
    pq.write_table(
        pa.table({"input_ids": typed.slice(0, 0), "loss_mask": pa.array([], pa.list_(pa.int8()))}), data / "3.parquet"
    )
    (data / "b/.cache/half.parquet").write_bytes(b"PAR1")
    manifest, rows = merged(tmp_path, data)
    assert sorted(row.input_ids for row in rows) == sorted(ids + more)
    assert {row.id for row in rows} >= {"7", "8"}
    assert [message.role for row in rows for message in row.messages] == ["user", "assistant"] * 2
    assert any("b/2.parquet: columns left out: score" in note for note in manifest.notes)


def test_rejects_of_a_validation_are_no_base(tmp_path):
    shard(tmp_path / "base/alpha/000.parquet", [sample(1, "old")])
    refused = Reject(**{name: getattr(sample(2, "old"), name) for name in Sample.__slots__}, check="bos", detail="2")
    records.write_rows(tmp_path / "base/alpha/000.rejects.parquet", Reject, [refused], {})
    _, rows = merged(tmp_path, tmp_path / "base")
    assert [row.id for row in rows] == [sample(1, "old").id]


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


def test_files_behind_links_are_read_once(tmp_path):
    """A cache of downloads and a second disk are folders of links."""
    ids, masks = map(list, zip(*GOOD[:3]))
    (tmp_path / "disk").mkdir()
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": masks}), tmp_path / "disk/blob.parquet")
    base = tmp_path / "base"
    base.mkdir()
    (base / "more").symlink_to(tmp_path / "disk")
    (base / "again.parquet").symlink_to(tmp_path / "disk/blob.parquet")
    (base / "round").symlink_to(base)
    assert sum(file.rows for file in base_files(base)) == 3
    (base / "lost.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(UserError, match=r"lost\.parquet"):
        base_files(base)


def test_a_manifest_of_others_is_none_of_ours(tmp_path):
    base = foreign(tmp_path, input_ids=IDS, loss_mask=MASK)
    (base / "manifest.json").write_text('{"files": ["train-00000.parquet"], "schema_version": 7}')
    _, rows = merged(tmp_path, base)
    assert len(rows) == 3


def test_the_datasets_export_of_a_corpus_can_be_the_base_of_another(tmp_path):
    corpus(tmp_path / "old", config(("old",), rows_per_part=30), shards(tmp_path / "old/validated", 20, ("old",)))
    exported = tmp_path / "export"
    (exported / "data").mkdir(parents=True)
    parts = sorted((tmp_path / "old/training").glob("part-*.parquet"))
    for number, part in enumerate(parts):
        shutil.copy(part, exported / f"data/train-{number:05d}-of-{len(parts):05d}.parquet")
    shutil.copy(tmp_path / "old/training/manifest.json", exported)
    _, rows = merged(tmp_path, exported)
    assert len(rows) == 40
    (exported / "data/train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="holds 1 of the 2 parts of its manifest"):
        base_files(exported)


def test_nobody_is_told_to_delete_a_base(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/x.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(
        UserError, match=r"x\.parquet: not a readable Parquet file .*: mend it, or take it out of the base"
    ):
        base_files(tmp_path / "base")


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
