import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.core import durable, records
from scripts.lib.training.manifest import read_manifest, write_manifest
from scripts.lib.training.verify import MOST, row_problems, verify
from tests.corpora import config, corpus

LIST = records.SAMPLE_SCHEMA.field("input_ids").type
MASK = records.SAMPLE_SCHEMA.field("loss_mask").type


def test_bad_rows_are_found_by_number():
    table = pa.table(
        {
            "input_ids": pa.array([[1], [], [1, 2], [1, 99], [5]], LIST),
            "loss_mask": pa.array([[1], [], [1], [0, 1], [3]], MASK),
        }
    )
    assert row_problems(table, 50) == [
        (1, "no tokens", "has no tokens"),
        (2, "mask of another length", "has 2 ids but 1 mask values"),
        (4, "mask value", "has the mask value 3, only 0 and 1 are known"),
        (3, "token id", "has the token id 99, outside of 0 to 49"),
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
        (lambda t: edit(t, lambda m: m["inputs"].pop()), "the inputs of kind shard hold 60 rows"),
    ],
)
def test_verify_finds_it(training, spoil, message):
    assert verify(training)[1] == []
    spoil(training)
    problems = verify(training)[1]
    assert any(message in problem for problem in problems), problems


def first_provenance(manifest):
    return next(iter(manifest["provenance"].values()))


CHANGES = {
    "version": lambda m: m.update(version="0" * 16),
    "tokenizer_hash": lambda m: m["target"].update(tokenizer_hash="v" * 16),
    "target": lambda m: m.update(target={}),
    "provenance": lambda m: m.update(provenance={}),
    "a shard's provenance": lambda m: first_provenance(m).update(stage="tokens"),
    "an input's sha256": lambda m: m["inputs"][0].update(sha256="0" * 64),
    "an input's name": lambda m: m["inputs"][0].update(name="gamma/000.parquet"),
    "an input's rows": lambda m: m["inputs"][0].update(rows=21),
    "an input's kind": lambda m: m["inputs"][0].update(kind="base"),
    "ids_origin": lambda m: m["datasets"]["alpha"].update(ids_origin={"engine": 39, "given": 1}),
    "outcome": lambda m: m["datasets"]["alpha"].update(outcome={"ok": 40, "length": 1}),
    "from_base": lambda m: m["datasets"]["alpha"].update(from_base=3),
    "read": lambda m: m["datasets"]["alpha"].update(read=41),
    "funnel": lambda m: m["datasets"]["alpha"]["funnel"]["outcomes"].update(ok=39),
    "a whole funnel": lambda m: m["datasets"]["alpha"].pop("funnel"),
    "seed": lambda m: m["settings"]["merge"].update(seed=5),
    "no settings": lambda m: m.update(settings={}),
    "weights": lambda m: m["settings"]["weights"].update(alpha=0.5),
    "totals": lambda m: m["totals"].update(supervised_tokens=7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("sealed_again", [False, True])
def test_no_field_of_the_manifest_changes_unnoticed(training, change, sealed_again):
    edit(training, change)
    if sealed_again:  # by somebody who knows how
        write_manifest(read_manifest(training), training)
    problems = verify(training)[1]
    assert problems
    assert ("was changed: its seal doesn't fit" in problems[0]) is not sealed_again


def test_notes_are_sealed_too(training):
    edit(training, lambda m: m["notes"].append("nothing was left out"))
    assert verify(training)[1] == [f"{training / 'manifest.json'}: was changed: its seal doesn't fit"]


def test_many_problems_of_a_kind_are_a_few_lines_and_their_number(training):
    edit(training, lambda m: m["settings"]["merge"].update(seed=5))
    write_manifest(read_manifest(training), training)
    problems = verify(training)[1]
    out_of_order = [line for line in problems if "is out of the shuffle's order" in line]
    assert len(out_of_order) == MOST
    (more,) = [line for line in problems if line.startswith("... and ")]
    assert int(more.split()[2]) == problems.total - len(problems) + 1 > 20


def test_manifests_of_before_they_were_sealed_are_read_and_hold(training):
    def older(manifest):
        del manifest["seal"]
        manifest["schema_version"] = 1

    edit(training, older)
    assert verify(training)[1] == []


def test_a_version_in_the_folder_of_another_one(training, tmp_path):
    moved = tmp_path / "corpora" / ("0" * 16)
    training.resolve().rename(moved)
    version = read_manifest(moved).version
    assert verify(moved)[1] == [f"{moved / 'manifest.json'}: version {version} lies in the folder of another one"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.drop_columns(["outcome"]), "has no column `outcome`"),
        (lambda table: replaced(table, "input_ids", ["x"] * len(table)), "column `input_ids` is of type string"),
        (lambda table: replaced(table, "id", list(range(len(table)))), "column `id` is of type int64"),
        (lambda table: replaced(table, "id", [None, *table["id"].to_pylist()[1:]]), "column `id` holds nulls"),
    ],
)
def test_a_part_whose_columns_are_others(training, change, says):
    path = training / "part-00000.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    edit(training, lambda m: m["parts"][0].update(sha256=durable.sha256_file(path), bytes=path.stat().st_size))
    assert f"{path}: {says}" in verify(training)[1]


def replaced(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))
