"""The real Snakefile on the real engine: what one finished run holds, and what a second run does."""

import collections
import copy
import itertools
import json
import re

import pytest
import requests

from scripts.lib.core.records import Completion, Prompt, Sample, read_rows
from tests.workflow.conftest import CONFIG
from tests.workflow.project import Project
from tests.workflow.recording_proxy import recording

pytestmark = pytest.mark.xdist_group("pipeline")


# Of the session: tests of other modules may run between those of this one.
@pytest.fixture(scope="session")
def finished(tmp_path_factory, engine):
    """A project after `merge_training`, with everything that passed between client and engine."""
    with recording(engine) as recorder:
        config = copy.deepcopy(CONFIG)
        config["engine"]["endpoints"] = [recorder.url]
        project = Project(tmp_path_factory.mktemp("pipeline") / "project", config)
        plan = project.snakemake("-n", "merge_training").stdout
        project.snakemake("merge_training")
        yield project, recorder, plan


def rows(project, stage, kind):
    found = []
    for path in sorted(project.result(stage).rglob("*.parquet")):
        if path.name != "keys.parquet" and not path.name.endswith(".rejects.parquet"):
            found += read_rows(path, kind)
    return found


def executed(output):
    """Names of the jobs that a run started, the target rule `all` aside."""
    return [name for name in re.findall(r"^(?:local)?rule (\w+):", output, re.MULTILINE) if name != "all"]


def corpus(project):
    return [
        sample
        for part in sorted(project.result("training").glob("part-*.parquet"))
        for sample in read_rows(part, Sample)
    ]


def test_the_plan_names_every_stage(finished):
    _, _, plan = finished
    for rule in (
        "prepare_target",
        "prepare_prompts",
        "generate_completions",
        "tokenize_completions",
        "tokenize_conversations",
        "validate_tokens",
        "summarize_validation",
        "backup_training",
        "merge_training",
    ):
        assert rule in plan


def test_every_prompt_has_exactly_one_outcome(finished):
    project, _, _ = finished
    prompts = [prompt.id for prompt in rows(project, "prompts", Prompt) if prompt.dataset != "conversations"]
    completions = [completion.id for completion in rows(project, "completions", Completion)]
    assert len(prompts) == 16
    assert sorted(completions) == sorted(prompts)
    assert len(set(prompts)) == len(prompts)


def test_prompt_ids_are_the_engines_own_rendering_of_the_same_messages(finished, engine):
    """llama.cpp renders the messages with the model's template and tokenizes them: ids must be equal."""
    project, _, _ = finished
    turns = 0
    for completion in rows(project, "completions", Completion):
        position = 0
        for turn in completion.turns:
            # The history of a turn is all messages up to the assistant message that answers it.
            position = next(i for i, m in enumerate(completion.messages) if m.role == "assistant" and i >= position)
            history = [{"role": m.role, "content": m.content} for m in completion.messages[:position]]
            text = requests.post(f"{engine}/apply-template", json={"messages": history}, timeout=60).json()["prompt"]
            body = {"content": text, "add_special": True, "parse_special": True}
            ids = requests.post(f"{engine}/tokenize", json=body, timeout=60).json()["tokens"]
            assert turn.prompt_ids == ids
            position += 1
            turns += 1
    assert turns >= 16


def test_output_ids_are_those_that_the_engine_reported(finished):
    project, recorder, _ = finished
    reported = collections.Counter((tuple(e.prompt_ids), tuple(e.output_ids)) for e in recorder.delivered())
    kept = collections.Counter(
        (tuple(turn.prompt_ids), tuple(turn.output_ids))
        for completion in rows(project, "completions", Completion)
        for turn in completion.turns
    )
    assert kept
    assert not kept - reported
    # What was asked beyond that are canaries and readiness probes: no prompt twice.
    prompts = {ids for ids, _ in kept}
    assert not [ids for ids, _ in (reported - kept) if ids in prompts]


def test_samples_hold_the_ids_and_supervise_only_what_was_sampled(finished):
    project, _, _ = finished
    generated = {}
    for completion in rows(project, "completions", Completion):
        for turn in completion.turns:
            generated.setdefault(completion.id, []).append((turn.prompt_ids, turn.output_ids))
    seen = 0
    for sample in corpus(project):
        assert len(sample.input_ids) == len(sample.loss_mask)
        assert 0 < sum(sample.loss_mask) < len(sample.loss_mask)
        if sample.prompt_id in generated:
            turns = generated[sample.prompt_id]
            supervised = [token for token, mask in zip(sample.input_ids, sample.loss_mask) if mask]
            # One turn, or several that were merged because each prompt continues the one before.
            runs = (turns[a:b] for a in range(len(turns)) for b in range(a + 1, len(turns) + 1))
            assert supervised in [list(itertools.chain.from_iterable(output for _, output in run)) for run in runs]
            assert any(sample.input_ids[: len(prompt)] == prompt for prompt, _ in turns)
            seen += 1
    assert seen >= 14


def test_the_manifest_adds_up(finished):
    project, _, _ = finished
    manifest = json.loads(project.result("training/manifest.json").read_text())
    samples = corpus(project)
    assert manifest["totals"]["rows"] == len(samples)
    assert manifest["totals"]["tokens"] == sum(len(sample.input_ids) for sample in samples)
    assert project.run("scripts.verify_training", "--training", "results/training").returncode == 0


def test_progress_json_tells_the_whole_run(finished):
    project, _, _ = finished
    progress = json.loads(project.result("progress.json").read_text())
    assert progress["status"] == "done"
    assert progress["total"] == 16
    assert progress["completed"] + progress["failed"] == 16
    for key in (
        "rate_per_sec",
        "eta_hours",
        "total_input_tokens",
        "total_output_tokens",
        "avg_output_tokens",
        "elapsed_hours",
    ):
        assert key in progress
    assert set(progress["datasets"]) == {"code", "chat"}


def test_show_marks_the_supervised_tokens(finished):
    project, _, _ = finished
    sample = next(sample for sample in corpus(project) if sample.dataset == "code" and "/" not in sample.id)
    shown = project.run("scripts.show", "--id", sample.id).stdout
    assert sample.id in shown
    assert "<|im_start|>assistant\n⟦" in shown


def test_a_second_run_does_nothing(finished):
    project, recorder, _ = finished
    before = len(recorder.exchanges)
    assert "Nothing to be done" in project.snakemake("merge_training").stdout
    assert len(recorder.exchanges) == before


def test_an_operational_edit_reruns_nothing(finished):
    project, _, _ = finished
    config = copy.deepcopy(project.config)
    config["lanes"]["short"]["concurrency"] = 3
    config["transport"] = {"attempts": 9}
    project.configure(config)
    assert "Nothing to be done" in project.snakemake("merge_training").stdout


def test_a_deleted_shard_alone_is_rebuilt_and_asks_for_nothing(finished):
    project, recorder, _ = finished
    shard = project.result("completions/code/000.parquet")
    version = project.result("training").resolve()
    before, asked = shard.read_bytes(), len(recorder.exchanges)
    shard.unlink()
    output = project.snakemake("all").stdout
    # That shard and what is made from it; no other shard, and the same corpus again.
    assert sorted(executed(output)) == [
        "backup_training",
        "generate_completions",
        "merge_training",
        "summarize_validation",
        "tokenize_completions",
        "validate_tokens",
    ]
    assert project.result("training").resolve() == version
    assert shard.read_bytes() == before
    assert len(recorder.exchanges) == asked


def test_a_new_dataset_leaves_a_backup_that_restores_byte_for_byte(finished):
    project, recorder, _ = finished
    corpus_bytes = {p.name: p.read_bytes() for p in project.result("training").iterdir()}
    asked = {tuple(exchange.prompt_ids) for exchange in recorder.delivered() if len(exchange.output_ids) > 1}
    before = len(recorder.exchanges)
    config = copy.deepcopy(project.config)
    config["datasets"]["maths"] = {"class": "B", "source": "config/prompts/maths.csv", "max_samples": 4}
    project.configure(config)
    project.snakemake("merge_training")
    repeated = [e for e in recorder.exchanges[before:] if len(e.output_ids) > 1 and tuple(e.prompt_ids) in asked]
    # Canaries repeat by design; no prompt of the old datasets may.
    old = {
        tuple(t.prompt_ids) for c in rows(project, "completions", Completion) if c.dataset != "maths" for t in c.turns
    }
    assert not [e for e in repeated if tuple(e.prompt_ids) in old]
    assert {sample.dataset for sample in corpus(project)} == {"code", "chat", "conversations", "maths"}
    (backup,) = [path for path in project.result("backups").iterdir() if not path.name.startswith(".")]
    project.snakemake("restore_training", "--config", f"restore={backup.name}")
    assert {p.name: p.read_bytes() for p in project.result("training").iterdir()} == corpus_bytes
