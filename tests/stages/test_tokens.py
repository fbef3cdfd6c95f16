"""Stages 3 and 4 by their command lines: target, samples, gates, accounting, summary."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from scripts import prepare_target, summarize_validation, tokenize_completions, tokenize_conversations, validate_tokens
from scripts.lib.core.records import Completion, Message, Prompt, Reject, Sample, read_provenance, read_rows, write_rows
from tests.dialogues import converse, said
from tests.families import FAMILIES, build, target

NAME = "kimi-k2.5"


@dataclass
class Project:
    """Files of a small run in a temporary folder."""

    root: Path

    @property
    def target(self) -> list[str]:
        return ["--config", str(self.root / "config.yaml"), "--target", str(self.root / "target")]

    def configure(self, **sections) -> None:
        values = {
            "model": {"name": str(self.root / "model")},
            "datasets": {"chat": {"class": "B", "source": "x"}, "ready": {"class": "A", "source": "x"}},
        }
        (self.root / "config.yaml").write_text(yaml.safe_dump(values | sections))

    def file(self, stage: str, dataset: str = "chat", suffix: str = ".parquet") -> Path:
        return self.root / stage / dataset / f"000{suffix}"

    def tokenize(self, dataset: str = "chat") -> int:
        arguments = ["--dataset", dataset, "--prompts", str(self.file("prompts", dataset))]
        arguments += ["--output", str(self.file("tokens", dataset))]
        if dataset == "ready":
            return tokenize_conversations.main([*self.target, *arguments])
        arguments += ["--completions", str(self.file("completions"))]
        return tokenize_completions.main([*self.target, *arguments])

    def validate(self, dataset: str = "chat") -> int:
        completions = [] if dataset == "ready" else [str(self.file("completions"))]
        arguments = ["--dataset", dataset, "--prompts", str(self.file("prompts", dataset))]
        arguments += ["--completions", *completions, "--tokens", str(self.file("tokens", dataset))]
        arguments += ["--output", str(self.file("validated", dataset))]
        arguments += ["--rejects", str(self.file("validated", dataset, ".rejects.parquet"))]
        arguments += ["--summary", str(self.file("validated", dataset, ".json"))]
        return validate_tokens.main([*self.target, *arguments])

    def summarize(self, *more: str) -> int:
        summaries = [str(path) for path in sorted((self.root / "validated").glob("*/000.json"))]
        output = ["--output", str(self.root / "validated/summary.json")]
        return summarize_validation.main([*self.target, "--summaries", *summaries, *output, *more])

    def summary(self, dataset: str = "chat") -> dict:
        return json.loads(self.file("validated", dataset, ".json").read_text())


def id_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


def prompt(number: int, *texts: str, **changes) -> Prompt:
    messages = [Message("user", text) for text in texts]
    return Prompt(
        **(
            {"id": id_of(number), "dataset": "chat", "source": f"chat.jsonl:{number}", "key": "k", "messages": messages}
            | changes
        )
    )


def answered(prompt: Prompt, outcome: str = "ok", answers: int | None = None) -> Completion:
    model = target(NAME)
    texts = [message.content for message in prompt.messages]
    count = len(texts) if answers is None else answers
    outputs = [said(NAME, model.encode(f"Answer {i} to {text}"), model.encode("Hm.")) for i, text in enumerate(texts)]
    completion = converse(model, texts[:count], outputs[:count])
    completion.id, completion.dataset, completion.outcome = prompt.id, "chat", outcome
    completion.messages += prompt.messages[count:]
    return completion


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    build(FAMILIES[NAME], tmp_path / "model")
    project.configure()
    assert prepare_target.main(["--config", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "target")]) == 0
    return project


@pytest.fixture
def shard(project: Project) -> tuple[list[Prompt], list[Completion]]:
    """Answers of every kind: one turn, two turns, a failure in the second turn, a truncated one, an exhausted one."""
    prompts = [
        prompt(0, "one"),
        prompt(1, "one", "two"),
        prompt(2, "first", "second"),
        prompt(3, "long"),
        prompt(4, "gone"),
    ]
    completions = [answered(prompts[0]), answered(prompts[1]), answered(prompts[2], "exhausted", 1)]
    cut = answered(prompts[3], "length")
    cut.turns[0].output_ids = cut.turns[0].output_ids[:6]
    cut.turns[0].finish_reason = "length"
    completions += [cut, answered(prompts[4], "rejected", 0)]
    write_rows(project.file("prompts"), Prompt, prompts, {"stage": "prompts", "revision": "abc"})
    write_rows(project.file("completions"), Completion, completions, {"stage": "completions", "engine": "sglang"})
    return prompts, completions


def test_class_b_from_completions_to_the_summary(project: Project, shard, capsys: pytest.CaptureFixture[str]):
    prompts, completions = shard
    assert project.tokenize() == 0
    samples = list(read_rows(project.file("tokens"), Sample))
    ids = [prompt.id for prompt in prompts]
    assert [sample.id for sample in samples] == [ids[0], f"{ids[1]}/0", f"{ids[1]}/1", ids[2], ids[3]]
    assert [sample.outcome for sample in samples] == ["ok", "ok", "ok", "ok", "length"]
    turns = [turn for completion in completions for turn in completion.turns]
    assert [sample.input_ids for sample in samples] == [turn.prompt_ids + turn.output_ids for turn in turns]
    provenance = read_provenance(project.file("tokens"))
    assert [part["stage"] for part in provenance["inputs"]] == ["prompts", "completions"]
    assert provenance["target"]["tokenizer_hash"]

    assert project.validate() == 0
    summary = project.summary()
    assert summary["outcomes"] == {"exhausted": 1, "length": 1, "ok": 2, "rejected": 1}
    assert summary["without_sample"] == {"rejected": 1}
    assert (summary["prompts"], summary["samples"], summary["passed"], summary["rejects"]) == (5, 5, 5, {})
    assert (summary["following_turns"], summary["merged_turns"]) == (1, 0)
    assert summary["finish_reasons"] == {"length": 1, "stop": 4}
    assert summary["statistics"]["supervised_tokens"] == sum(len(turn.output_ids) for turn in turns)
    assert list(read_rows(project.file("validated"), Sample)) == samples
    assert list(read_rows(project.file("validated", suffix=".rejects.parquet"), Reject)) == []

    capsys.readouterr()
    assert project.summarize("--token-frequencies", str(project.root / "frequencies.parquet")) == 0
    shown = capsys.readouterr().out
    assert "chat" in shown
    assert "rejected" in shown
    total = json.loads((project.root / "validated/summary.json").read_text())["total"]
    assert (total["prompts"], total["passed"], total["reject_rate"]) == (5, 5, 0.0)
    assert total["length"]["max"] == max(len(sample.input_ids) for sample in samples)

    frequencies = pq.read_table(project.root / "frequencies.parquet").to_pydict()
    assert frequencies["token_id"] == list(range(163840))
    assert sum(frequencies["count"]) == total["tokens"]
    assert sum(frequencies["supervised"]) == total["supervised_tokens"]
    assert frequencies["supervised"][163586] == 4
    assert frequencies["count"][163586] > 4


def test_class_a_conversations_and_ready_tokens(project: Project):
    rows = [
        prompt(0, dataset="ready", messages=[Message("user", "hi"), Message("assistant", "4.", "Simple.")]),
        prompt(1, dataset="ready", messages=[], input_ids=[163587, 310, 311, 163586], loss_mask=[0, 0, 1, 1]),
        prompt(2, dataset="ready", messages=[], input_ids=[163587, 310, 311, 10**6], loss_mask=[0, 0, 1, 1]),
        prompt(3, dataset="ready", messages=[Message("user", "hi"), Message("assistant", "no <|im_end|>")]),
    ]
    write_rows(project.file("prompts", "ready"), Prompt, rows, {"stage": "prompts"})
    assert project.tokenize("ready") == 0
    assert project.validate("ready") == 0
    assert project.summary("ready")["rejects"] == {"control_token_in_text": 1, "id_range": 1}
    passed = list(read_rows(project.file("validated", "ready"), Sample))
    assert [(sample.prompt_id, sample.ids_origin) for sample in passed] == [(id_of(0), "rendered"), (id_of(1), "given")]
    rejects = list(read_rows(project.file("validated", "ready", ".rejects.parquet"), Reject))
    assert [(reject.id, reject.check) for reject in rejects] == [
        (id_of(2), "id_range"),
        (id_of(3), "control_token_in_text"),
    ]
    assert rejects[0].detail == "id 1000000 at 3, the model has 163840 ids"
    assert rejects[0].input_ids == [163587, 310, 311, 10**6]


def test_too_many_rejects_stop_the_run_and_say_why(project: Project, shard, capsys: pytest.CaptureFixture[str]):
    project.configure(validation={"max_length": 3, "max_reject_rate": 0.5})
    assert project.tokenize() == 0
    assert project.validate() == 0
    assert project.summarize() == 1
    error = capsys.readouterr().err
    assert "chat: 5 of 5 samples refused (max_length 5)" in error
    assert "validation.max_reject_rate" in error
    assert not (project.root / "validated/summary.json").exists()
    project.configure(validation={"max_length": 3, "max_reject_rate": 1.0})
    assert project.summarize() == 0


def test_outputs_are_the_same_every_time(project: Project, shard):
    def outputs() -> dict[str, bytes]:
        assert project.tokenize() == project.validate() == project.summarize() == 0
        files = [*(project.root / "tokens").rglob("*"), *(project.root / "validated").rglob("*")]
        return {str(path): path.read_bytes() for path in files if path.is_file()}

    first = outputs()
    assert outputs() == first
    assert len(first) == 5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda prompts, completions: completions.pop(), "1 prompts of .* have no outcome"),
        (lambda prompts, completions: completions.append(completions[0]), "has two outcomes"),
        (lambda prompts, completions: prompts.pop(), "is not a prompt of"),
    ],
)
def test_prompts_and_completions_that_do_not_fit(project: Project, shard, spoil, message: str, capsys):
    prompts, completions = shard
    spoil(prompts, completions)
    write_rows(project.file("prompts"), Prompt, prompts, {})
    write_rows(project.file("completions"), Completion, completions, {})
    assert project.tokenize() == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not project.file("tokens").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda samples: samples.pop(0), "1 answered prompts of"),
        (lambda samples: setattr(samples[0], "prompt_id", "f" * 32), "come from no prompt"),
    ],
)
def test_samples_that_do_not_fit_their_prompts(project: Project, shard, spoil, message: str, capsys):
    assert project.tokenize() == 0
    samples = list(read_rows(project.file("tokens"), Sample))
    spoil(samples)
    write_rows(project.file("tokens"), Sample, samples, {})
    assert project.validate() == 1
    assert message in capsys.readouterr().err
    assert not project.file("validated", suffix=".json").exists()


def test_a_class_a_prompt_without_a_sample_is_missed(project: Project, capsys):
    rows = [prompt(0, dataset="ready", messages=[Message("user", "hi"), Message("assistant", "4.")])]
    write_rows(project.file("prompts", "ready"), Prompt, rows, {})
    write_rows(project.file("tokens", "ready"), Sample, [], {})
    assert project.validate("ready") == 1
    assert "1 prompts of" in capsys.readouterr().err


def test_dropped_answers_are_counted_by_outcome(project: Project, shard):
    project.configure(datasets={"chat": {"class": "B", "source": "x", "truncation": "drop"}})
    assert project.tokenize() == 0
    assert project.validate() == 0
    assert project.summary()["without_sample"] == {"length": 1, "rejected": 1}


@pytest.mark.parametrize("name", ["prompts", "completions"])
def test_missing_and_broken_inputs_are_one_line(project: Project, shard, name: str, capsys):
    project.file(name).write_bytes(b"not parquet")
    assert project.tokenize() == 1
    error = capsys.readouterr().err
    assert f"{project.file(name)}: not a readable Parquet file" in error
    assert error.count("\n") == 1
    project.file(name).unlink()
    assert project.tokenize() == 1
    assert "no such file" in capsys.readouterr().err


def test_summaries_of_something_else_are_refused(project: Project, shard, capsys):
    project.file("validated", suffix=".json").parent.mkdir(parents=True)
    project.file("validated", suffix=".json").write_text('{"dataset": "chat"}')
    assert project.summarize() == 1
    assert "not a summary of validate_tokens" in capsys.readouterr().err


def test_reconstruction_drift_is_measured_where_the_truth_is_known(project: Project):
    model = target(NAME)
    prompts = [prompt(number, "one") for number in range(4)]
    completions = [answered(one) for one in prompts]
    apart = [token for character in "Answer" for token in model.encode(character)]
    completions[0].turns[0].output_ids = said(NAME, apart, model.encode("Hm."))
    completions[1].turns[0].ids_origin = "reconstructed"
    write_rows(project.file("prompts"), Prompt, prompts, {})
    write_rows(project.file("completions"), Completion, completions, {})
    assert project.tokenize() == 0
    assert project.validate() == 0
    assert project.summary()["reconstruction"] == {"turns": 3, "drifted": 1}
    assert project.summarize() == 0
    totals = json.loads((project.root / "validated/summary.json").read_text())["datasets"]["chat"]
    assert totals["reconstruction_drift"] == pytest.approx(1 / 3, abs=1e-6)
    assert totals["ids_origin"] == {"engine": 3, "reconstructed": 1}
