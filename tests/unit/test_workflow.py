"""What the Snakefile is told about a configuration."""

from pathlib import Path
from typing import Any

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import PROJECT
from scripts.lib.exports import FORMATS
from scripts.lib.workflow import RunPlan


def plan(folder: Path, **settings: Any) -> RunPlan:
    for name in ("asked", "given"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    datasets = {
        "asked": {"class": "B", "source": str(folder / "asked.jsonl")},
        "given": {"class": "A", "source": str(folder / "given.jsonl")},
    }
    values = {"model": {"name": "embedded:smollm2"}, "datasets": datasets, "shards": 2, **settings}
    return RunPlan.of(values, ["my.yaml"])


def test_every_file_on_the_way_to_the_corpus(tmp_path: Path) -> None:
    shards = ("000", "001")
    expected = [f"results/completions/asked/{shard}.parquet" for shard in shards]
    for stage in ("tokens", "validated"):
        expected += [f"results/{stage}/{name}/{shard}.parquet" for name in ("asked", "given") for shard in shards]
    assert plan(tmp_path).shard_files == expected


def test_of_equal_prompts_the_dataset_that_is_named_first_keeps_its_own(tmp_path: Path) -> None:
    across = plan(tmp_path, selection={"deduplicate": "across"})
    assert (across.before("asked"), across.before("given")) == ([], ["asked"])
    assert plan(tmp_path, selection={"deduplicate": "within"}).before("given") == []


def test_an_environment_is_made_for_servers_that_are_started_here(tmp_path: Path) -> None:
    launch = {"environment": ".venvs/sglang", "gpus_per_replica": 0}
    assert plan(tmp_path, engine={"kind": "sglang", "launch": launch}).environment == [
        ".venvs/sglang/drafter-corpus.json"
    ]
    elsewhere = {"kind": "sglang", "launch": launch, "endpoints": ["http://127.0.0.1:30000"]}
    assert plan(tmp_path, engine=elsewhere).environment == []
    own = {"kind": "sglang", "launch": launch | {"environment": "/opt/sglang"}}
    assert plan(tmp_path, engine=own).environment == []


def test_hidden_states_that_were_removed_by_hand_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert not made.hidden_states_lost()
    (tmp_path / "results/state").mkdir(parents=True)
    (tmp_path / "results/state/hidden_states.json").touch()
    assert made.hidden_states_lost()
    (tmp_path / "results/hidden_states").mkdir()
    (tmp_path / "results/hidden_states/manifest.json").touch()
    assert not made.hidden_states_lost()
    with pytest.raises(UserError, match="hidden states come from `sglang`, not from `llamacpp`"):
        made.hidden_states_receipt()


def test_a_disk_that_takes_no_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").write_text("in the way")
    with pytest.raises(UserError, match="results"):
        made.begin()


def test_a_shard_that_was_put_back_is_kept_before_its_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snakemake deletes it as an output of the job that would look for its answers."""
    made = plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    declared = tmp_path / "results/completions/d/000.parquet"
    declared.parent.mkdir(parents=True)
    declared.write_bytes(b"answers")
    made.begin()
    declared.unlink()
    assert (tmp_path / "results/state/completions/d/000.parquet").read_bytes() == b"answers"


def test_each_export_has_a_rule(tmp_path: Path) -> None:
    assert plan(tmp_path).export_formats == tuple(FORMATS), "EXPORT_FORMATS (config/model.py) has the order of FORMATS"


def test_the_snakefile_fits_on_a_screen() -> None:
    assert len((PROJECT / "Snakefile").read_text().splitlines()) <= 60
