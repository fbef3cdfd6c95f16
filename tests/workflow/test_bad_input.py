"""A user's mistake is one line that says what and where, before any prompt is spent."""

import pytest

from tests.workflow.project import Project

pytestmark = pytest.mark.xdist_group("bad_input")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("bad") / "project", {"datasets": {"a": {"class": "B", "source": "a.jsonl"}}})


def fails(project, config, *arguments):
    project.configure({"lanes": {"short": {"max_tokens": 24, "concurrency": 8}}, **config})
    done = project.snakemake(*arguments, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    return done.stdout


def test_unknown_key(project):
    output = fails(project, {"datasets": {"a": {"class": "B", "source": "a.jsonl", "max_sample": 3}}}, "-n")
    assert "test.yaml: unknown key `datasets.a.max_sample`, did you mean `max_samples`?" in output


def test_wrong_type(project):
    output = fails(project, {"datasets": {"a": {"class": "B", "source": "a.jsonl"}}, "shards": "many"}, "-n")
    assert "shards: Input should be a valid integer" in output
    assert "'many'" in output


def test_missing_file(project):
    output = fails(project, {"datasets": {"a": {"class": "B", "source": "nowhere/a.jsonl"}}}, "-n")
    assert "datasets.a.source" in output
    assert "nowhere/a.jsonl" in output


def test_empty_dataset(project):
    (project.folder / "a.jsonl").write_text("")
    output = fails(project, {"datasets": {"a": {"class": "B", "source": "a.jsonl"}}}, "prompts")
    assert "a.jsonl" in output
    assert "no rows" in output


def test_broken_line_is_named_by_file_and_line(project):
    (project.folder / "a.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n{"prompt": "three"}\n')
    config = {"datasets": {"a": {"class": "B", "source": "a.jsonl"}}, "cleaning": {"max_reject_rate": 0.1}}
    output = fails(project, config, "prompts")
    assert "a.jsonl:2" in output


def test_hidden_states_of_an_engine_that_has_none_are_refused_before_the_corpus_is_made(project):
    (project.folder / "a.jsonl").write_text('{"prompt": "one"}\n')
    project.configure({"datasets": {"a": {"class": "B", "source": "a.jsonl"}}})
    done = project.snakemake("hidden_states", check=False)
    assert done.returncode != 0
    assert "engine.kind: hidden states come from `sglang`, not from `llamacpp`" in done.stdout
    assert "Job stats" not in done.stdout  # not a job was begun
