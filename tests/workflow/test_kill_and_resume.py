"""SIGKILL in the middle of generation, several times, then resume: nothing lost, repeated or paid twice."""

import signal

import pytest

from scripts.lib.core.records import Completion, Prompt, read_rows
from tests.workflow.project import Project, kill_group, wait_for
from tests.workflow.recording_proxy import recording

pytestmark = pytest.mark.xdist_group("kill")


def stage(project, name, kind):
    files = [p for p in sorted(project.result(name).rglob("*.parquet")) if p.name != "keys.parquet"]
    return [row for path in files for row in read_rows(path, kind)]


def test_kill_9_at_several_moments(tmp_path, config, engine):
    """Kill Snakemake and its jobs after 3, 7 and 11 answers; the last run finishes the rest.

    The proxy is the witness: a prompt that it delivered an answer for, and whose answer had the time
    to reach the journal, is never asked again. Only requests in flight at a kill may be.
    """
    del config["datasets"]["conversations"]
    with recording(engine) as recorder:
        config["engine"]["endpoints"] = [recorder.url]
        project = Project(tmp_path / "project", config)
        project.snakemake("prompts")
        in_flight = 0
        for answers in (3, 7, 11):
            run = project.start("completions")
            wait_for(lambda: real_answers(recorder) >= answers, 60, f"{answers} answers")  # noqa: B023
            kill_group(run)
            # At most what the lane allows was in flight, and what arrived in the last instant.
            in_flight += config["lanes"]["short"]["concurrency"]
            wait_for(lambda: not project.processes(), 30, "all jobs of the killed run to be gone")
            project.snakemake("--unlock")
        project.snakemake("completions")

        prompts = {prompt.id for prompt in stage(project, "prompts", Prompt)}
        completions = stage(project, "completions", Completion)
        ids = [completion.id for completion in completions]
        assert set(ids) == prompts
        assert len(ids) == len(prompts) == 16

        turns = [turn for completion in completions for turn in completion.turns]
        delivered = [(tuple(e.prompt_ids), tuple(e.output_ids)) for e in recorder.delivered()]
        assert {(tuple(t.prompt_ids), tuple(t.output_ids)) for t in turns} <= set(delivered)
        assert real_answers(recorder) - len(turns) <= in_flight


def test_a_killed_snakemake_alone_leaves_no_server_behind(tmp_path, config):
    """kill -9 of Snakemake only: its jobs finish their shard or die, the fleet ends after its linger."""
    project = Project(tmp_path / "project", config)
    project.snakemake("prompts")
    run = project.start("completions")
    wait_for(lambda: journalled(project) >= 1, 90, "a first answer")
    run.send_signal(signal.SIGKILL)
    run.wait(10)
    wait_for(lambda: not project.processes(), 90, "every process of the run to end")
    project.snakemake("--unlock")
    project.snakemake("completions")
    assert {c.id for c in stage(project, "completions", Completion)} == {
        p.id for p in stage(project, "prompts", Prompt) if p.dataset != "conversations"
    }
    wait_for(lambda: not project.processes(), 30, "the fleet to end after the run")


@pytest.mark.parametrize("victim", ["job", "keeper"])
def test_a_killed_part_is_made_good_within_the_run(tmp_path, config, victim):
    """kill -9 of one job fails that job alone; of the keeper, the clients start the next one and go on."""
    config["lanes"]["short"]["max_tokens"] = 48
    project = Project(tmp_path / "project", config)
    project.snakemake("prompts")
    run = project.start("completions")
    wait_for(lambda: journalled(project) >= 1, 90, "a first answer")
    name = "scripts.generate_completions" if victim == "job" else "scripts.lib.fleet.keeper"
    killed = [process for process in project.processes() if name in " ".join(process.cmdline())]
    assert killed, f"no {victim} among {[p.cmdline() for p in project.processes()]}"
    killed[0].kill()
    code = run.wait(200)
    if victim == "keeper":
        assert code == 0, (project.folder / "killed.log").read_text()[-3000:]
    else:
        assert code != 0
        project.snakemake("completions")
    assert {c.id for c in stage(project, "completions", Completion)} == {
        p.id for p in stage(project, "prompts", Prompt) if p.dataset != "conversations"
    }
    wait_for(lambda: not project.processes(), 30, "the fleet to end after the run")


def journalled(project) -> int:
    """Answers in the journals of all shards: a line each, after the line that says what they are."""
    journals = project.result("state/journals").rglob("*.journal")
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in journals)


def real_answers(recorder) -> int:
    """Delivered answers of prompts: canaries and probes ask for a few tokens of one fixed prompt."""
    prompts = [tuple(e.prompt_ids) for e in recorder.delivered() if len(e.output_ids) > 8]
    return len(prompts)
