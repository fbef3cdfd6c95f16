import os
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.core import durable, locks, records
from scripts.lib.core.errors import UserError
from scripts.lib.training import merge as merge_module
from scripts.lib.training import versions
from scripts.lib.training.manifest import read_manifest
from scripts.lib.training.verify import verify
from tests.corpora import bytes_of, config, corpus, rows_of, sample, shard, shards, summary_of


def test_every_sample_arrives_once_and_unchanged(tmp_path):
    paths = shards(tmp_path / "validated")
    manifest = corpus(tmp_path, config(rows_per_part=30), paths)
    given = {row.id: row for path in paths for row in records.read_rows(path, records.Sample)}
    merged = rows_of(tmp_path / "training")
    assert {row.id: row for row in merged} == given
    assert len(merged) == len(given) == 80
    assert [part.rows for part in manifest.parts] == [30, 30, 20]
    assert [row.id for row in merged] != [*given]
    assert verify(tmp_path / "training")[1] == []


def test_equal_inputs_give_equal_bytes_wherever_and_however_they_are_read(tmp_path, monkeypatch):
    paths = shards(tmp_path / "a/validated")
    corpus(tmp_path / "a", paths=paths)
    monkeypatch.setattr(merge_module, "BUCKET_BYTES", 2000)
    monkeypatch.setattr("scripts.lib.training.inputs.BATCH_BYTES", 500)
    corpus(tmp_path / "b", paths=shards(tmp_path / "b/validated"))
    assert bytes_of(tmp_path / "a/training") == bytes_of(tmp_path / "b/training")


def test_merging_the_same_inputs_again_writes_nothing(tmp_path):
    paths = shards(tmp_path / "validated")
    first = corpus(tmp_path, paths=paths)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "training").iterdir()}
    assert corpus(tmp_path, paths=paths) == first
    assert {path.name: path.stat().st_ino for path in (tmp_path / "training").iterdir()} == before
    assert [path.name for path in versions.all_versions(tmp_path / "training")] == [first.version]


def test_results_can_be_moved(tmp_path):
    corpus(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert verify(tmp_path / "there/training")[1] == []


def test_newer_sample_of_an_id_wins_and_the_older_is_counted(tmp_path):
    old = [sample(number) for number in range(10)]
    base = shard(tmp_path / "base/part.parquet", old)
    new = [sample(number, input_ids=[7, 8, 9], loss_mask=[0, 1, 1]) for number in range(4)]
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [*new, sample("new")])]
    manifest = corpus(tmp_path, config(base=str(base.parent)), paths)
    by_id = {row.id: row for row in rows_of(tmp_path / "training")}
    assert len(by_id) == 11
    assert all(by_id[row.id] == row for row in new)
    assert manifest.datasets["alpha"]["dropped"] == {"weight": 0, "superseded": 4}
    assert manifest.datasets["alpha"]["read"] == 15
    assert [one.kind for one in manifest.inputs] == ["base", "shard"]


def test_weights_keep_a_share_by_seeded_hash_and_whole_conversations(tmp_path):
    turns = []
    for number in range(400):
        prompt_id = sample(number).id
        turns += [sample(f"{number}/{turn}", id=f"{prompt_id}/{turn}", prompt_id=prompt_id) for turn in range(2)]
    paths = [
        shard(tmp_path / "validated/alpha/000.parquet", turns),
        shard(tmp_path / "validated/beta/000.parquet", [sample(number, "beta") for number in range(100)]),
    ]
    manifest = corpus(tmp_path / "one", config(weights={"alpha": 0.25}), paths)
    kept = {row.id for row in rows_of(tmp_path / "one/training") if row.dataset == "alpha"}
    assert 140 < len(kept) < 260
    assert {one.replace("/0", "/1") for one in kept} == {one.replace("/1", "/1").replace("/0", "/1") for one in kept}
    assert len(kept) == 2 * len({one.split("/")[0] for one in kept})
    assert manifest.datasets["beta"]["rows"] == 100
    assert manifest.datasets["alpha"]["dropped"]["weight"] == 800 - len(kept)
    # A larger share holds the smaller one, another seed chooses others.
    corpus(tmp_path / "two", config(weights={"alpha": 0.5}), paths)
    assert kept < {row.id for row in rows_of(tmp_path / "two/training")}
    corpus(tmp_path / "three", config(weights={"alpha": 0.25}, seed=1), paths)
    assert kept != {row.id for row in rows_of(tmp_path / "three/training") if row.dataset == "alpha"}


def test_a_base_is_known_by_its_bytes_not_by_its_place(tmp_path):
    base = shard(tmp_path / "base/part.parquet", [sample(number, "old") for number in range(5)])
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample(0)])]
    first = corpus(tmp_path, config(base=str(base.parent)), paths)
    shutil.move(base.parent, tmp_path / "moved")
    assert corpus(tmp_path, config(base=str(tmp_path / "moved")), paths) == first
    assert str(tmp_path) not in (tmp_path / "training/manifest.json").read_text()


def test_base_weight_applies_to_the_base_alone(tmp_path):
    base = shard(tmp_path / "base/part.parquet", [sample(number, "old") for number in range(300)])
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample(number) for number in range(50)])]
    manifest = corpus(tmp_path, config(base=str(base.parent), base_weight=0.5), paths)
    assert manifest.datasets["alpha"]["rows"] == 50
    assert 110 < manifest.datasets["old"]["rows"] < 190


def test_a_corpus_of_ours_can_be_the_base_of_the_next(tmp_path):
    corpus(tmp_path / "first")
    base = tmp_path / "first/training"
    paths = [shard(tmp_path / "validated/alpha/000.parquet", [sample("new")])]
    manifest = corpus(tmp_path / "second", config(base=str(base)), paths)
    assert manifest.totals["rows"] == 81
    assert verify(tmp_path / "second/training")[1] == []


def test_row_groups_and_parts_stay_small_when_samples_are_long(tmp_path, monkeypatch):
    monkeypatch.setattr(merge_module, "GROUP_TOKENS", 100)
    corpus(tmp_path, config(rows_per_part=33))
    for path in (tmp_path / "training").glob("part-*.parquet"):
        with pq.ParquetFile(path) as file:
            groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
        for group in groups[:-1]:
            tokens = [len(ids) for ids in group["input_ids"].to_pylist()]
            assert sum(tokens) >= 100
            assert sum(tokens[:-1]) < 100
    assert verify(tmp_path / "training")[1] == []


def test_manifest_tells_inputs_provenance_and_settings(tmp_path):
    paths = shards(tmp_path / "validated", per_dataset=1)
    manifest = corpus(tmp_path, config(rows_per_part=9), paths)
    assert read_manifest(tmp_path / "training") == manifest
    assert [one.name for one in manifest.inputs] == ["alpha/000.parquet", "beta/000.parquet"]
    assert manifest.provenance[manifest.inputs[0].provenance]["stage"] == "validated"
    assert manifest.settings["merge"]["rows_per_part"] == 9
    assert records.read_provenance(tmp_path / "training/part-00000.parquet")["version"] == manifest.version
    assert str(tmp_path) not in (tmp_path / "training/manifest.json").read_text()


def test_changed_settings_or_inputs_make_another_version(tmp_path):
    paths = shards(tmp_path / "validated")
    versions = {
        corpus(tmp_path, config(), paths).version,
        corpus(tmp_path, config(seed=1), paths).version,
        corpus(tmp_path, config(weights={"alpha": 0.5}), paths).version,
        corpus(tmp_path, config(), paths[:-1]).version,
    }
    assert len(versions) == 4


def test_mixed_origins_are_refused_when_the_config_says_so(tmp_path):
    paths = shards(tmp_path / "validated", datasets=("alpha",))
    paths.append(shard(tmp_path / "validated/beta/000.parquet", [sample(0, "beta", ids_origin="reconstructed")]))
    with pytest.raises(UserError, match=r"ids of beta are reconstructed from text and those of alpha are the engine's"):
        corpus(tmp_path, config(mixed_ids_origin=False), paths)
    assert not (tmp_path / "training").exists()
    assert corpus(tmp_path, config(), paths).datasets["beta"]["ids_origin"] == {"reconstructed": 1}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), r"alpha/000\.parquet: no such file"),
        (lambda path: path.write_bytes(b"PAR1 nonsense"), r"alpha/000\.parquet: not a readable Parquet file"),
        (
            lambda path: pq.write_table(pa.table({"id": ["x"]}), path),
            r"alpha/000\.parquet: is not a shard of samples",
        ),
        (
            lambda path: shard(path, [sample(0, "gamma")]),
            r"alpha/000\.parquet: holds samples of the dataset 'gamma', which the config doesn't name",
        ),
        (lambda path: shard(path, []), r"no sample is left"),
    ],
)
def test_bad_inputs_are_named_and_the_old_corpus_stays(tmp_path, spoil, message):
    before = corpus(tmp_path)
    path = shard(tmp_path / "alpha/000.parquet", [sample(0)])
    spoil(path)
    with pytest.raises(UserError, match=message):
        corpus(tmp_path, paths=[path])
    assert verify(tmp_path / "training") == (before, [])
    assert [path.name for path in (tmp_path / "corpora").iterdir() if path.name != ".lock"] == [before.version]


def test_nothing_to_merge(tmp_path):
    with pytest.raises(UserError, match="no validated shard and no merge.base"):
        corpus(tmp_path, paths=[])


def test_a_full_disk_is_foreseen(tmp_path, monkeypatch):
    before = corpus(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="the merge needs .* GB free, 0.00 GB is left"):
        corpus(tmp_path, config(seed=1))
    assert verify(tmp_path / "training") == (before, [])


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    with versions.writer(tmp_path / "training"), pytest.raises(UserError, match=f"written by process {os.getpid()} on"):
        corpus(tmp_path)
    corpus(tmp_path)


def test_a_damaged_version_is_not_taken_for_finished(tmp_path):
    paths = shards(tmp_path / "validated")
    manifest = corpus(tmp_path, paths=paths)
    part = tmp_path / "training/part-00000.parquet"
    part.chmod(0o644)
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(
        UserError, match=r"part-00000\.parquet: its sha256 differs .*remove that folder and merge again"
    ):
        corpus(tmp_path, paths=paths)
    shutil.rmtree(tmp_path / "corpora" / manifest.version)
    assert corpus(tmp_path, paths=paths) == manifest
    assert verify(tmp_path / "training")[1] == []


def test_something_else_at_the_corpus_place_is_left_alone(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training/precious").write_text("mine")
    with pytest.raises(UserError, match="training: is not a link to a corpus version"):
        corpus(tmp_path)
    assert (tmp_path / "training/precious").read_text() == "mine"


def with_report(folder, name, rows, dropped):
    report = folder / "prompts" / name / "report.json"
    report.parent.mkdir(parents=True)
    reasons = {reason: {"count": count, "meaning": "", "examples": []} for reason, count in dropped.items()}
    durable.write_json(report, {"rows": rows, "kept": rows - sum(dropped.values()), "reasons": reasons})


def test_the_funnel_runs_from_source_to_corpus(tmp_path):
    paths = shards(tmp_path / "validated")
    summary = summary_of(paths)
    summary["datasets"]["alpha"] |= {
        "prompts": 50,
        "outcomes": {"ok": 45, "empty": 5},
        "without_sample": {"empty": 5},
        "samples": 45,
        "rejects": {"degenerate_tail": 5},
    }
    with_report(tmp_path, "alpha", 60, {"duplicate": 7, "empty_turn": 3})
    entry = corpus(tmp_path, config(weights={"alpha": 0.5}), paths, summary).datasets["alpha"]
    assert entry["funnel"] == {
        "source_rows": 60,
        "dropped": {"duplicate": 7, "empty_turn": 3},
        "kept": 50,
        "prompts": 50,
        "outcomes": {"ok": 45, "empty": 5},
        "without_sample": {"empty": 5},
        "samples": 45,
        "rejected": {"degenerate_tail": 5},
        "passed": 40,
    }
    assert entry["read"] == 40 == entry["rows"] + entry["dropped"]["weight"]
    assert verify(tmp_path / "training")[1] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"passed": 39, "samples": 39},
            "the shards of alpha hold 40 samples, the summary of validation says 39 passed",
        ),
        ({"samples": 41}, "alpha: rejected and passed don't add up to the 41 samples"),
        ({"outcomes": {"ok": 39}}, "alpha: the outcomes don't add up to the 40 prompts"),
        ({"without_sample": {"empty": 1}}, "alpha: 1 prompts without sample ended as empty, more than there are"),
        ({"prompts": 41, "outcomes": {"ok": 41}}, "alpha: 40 prompts were prepared, 41 were validated"),
    ],
)
def test_a_funnel_that_leaks_stops_the_merge(tmp_path, change, message):
    paths = shards(tmp_path / "validated")
    summary = summary_of(paths)
    summary["datasets"]["alpha"] |= change
    with_report(tmp_path, "alpha", 40, {})
    with pytest.raises(UserError, match=message):
        corpus(tmp_path, paths=paths, summary=summary)
    assert not (tmp_path / "training").exists()


def test_a_missing_or_foreign_summary_stops_the_merge(tmp_path):
    paths = shards(tmp_path / "validated")
    with pytest.raises(UserError, match="alpha hold 40 samples, the summary of validation says 0 passed"):
        corpus(tmp_path, paths=paths, summary={})
    with pytest.raises(UserError, match="alpha: has no 'prompts'"):
        corpus(tmp_path, paths=paths, summary={"datasets": {"alpha": {}}})
    forgotten = [path for path in paths if path.parent.name == "alpha"]
    with pytest.raises(UserError, match="the shards of beta hold 0 samples, the summary of validation says 40 passed"):
        corpus(tmp_path, paths=forgotten, summary=summary_of(paths))


def test_a_corpus_that_lost_much_takes_the_place_of_no_other(tmp_path):
    base = corpus(tmp_path / "old", config(("old",)), shards(tmp_path / "old/validated", 10, ("old",)))
    folder = str(tmp_path / "old/training")
    both = shards(tmp_path / "validated")
    first = corpus(tmp_path, config(base=folder), both)
    alpha = both[:2]
    cases = [
        (config(), both, "the dataset old (20 samples) is gone; its base (20 samples) is gone"),
        (config(("alpha",), base=folder), alpha, "the dataset beta (40 samples) is gone"),
        (config(weights={"alpha": 0.1, "beta": 0.1}, base=folder), both, "samples are left of 100"),
    ]
    for settings, paths, told in cases:
        with pytest.raises(UserError, match=re.escape(told) + r".*made but not put in place.*merge\.may_shrink: true"):
            corpus(tmp_path, settings, paths)
        assert read_manifest(tmp_path / "training") == first
    meant = corpus(tmp_path, config(("alpha",), may_shrink=True), alpha)
    assert read_manifest(tmp_path / "training") == meant
    assert base.totals["rows"] == 20


def test_what_is_meant_makes_no_other_version(tmp_path):
    assert corpus(tmp_path).version == corpus(tmp_path, config(may_shrink=True)).version
