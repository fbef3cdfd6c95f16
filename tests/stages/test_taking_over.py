"""Answers are paid once, wherever in the run they lie: other shards, other ids, other names, shards put back."""

import dataclasses
import shutil
from pathlib import Path

import orjson
import pytest

from scripts import generate_completions
from scripts.lib.completions.adoption import adopt
from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.core.paths import Results
from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Completion, Message, Prompt, read_rows, write_rows
from scripts.lib.prompts.shard import made_from
from scripts.lib.target.model import load_target
from tests.fault_server.answers import Answers
from tests.fault_server.answers import digest as answer_digest
from tests.generation import MODEL, Server, prompts, servers, target_folder

QUESTION = "What is 2+2? Answer with one number."


class Project:
    """A run of one dataset whose name, number of shards and ids may change."""

    def __init__(self, folder: Path, server: Server, rows: list[Prompt]) -> None:
        self.folder, self.server, self.rows = folder, server, rows
        self.results = Results(folder / "results")
        self.name, self.shards, self.serial = "chat", 1, "row"
        self.settings: dict = {}

    def prepare(self) -> None:
        """Stage 1, with ids that hash the dataset's name and `serial`."""
        shutil.rmtree(self.results.root / "prompts", ignore_errors=True)
        target = load_target(target_folder())
        made: dict[str, list[Prompt]] = {f"{number:03d}": [] for number in range(self.shards)}
        for number, row in enumerate(self.rows):
            ids = target.render(row.messages[:1])
            name = digest([self.name, self.serial, number])
            shard = f"{int(name[:8], 16) % self.shards:03d}"
            made[shard].append(dataclasses.replace(row, id=name, dataset=self.name, prompt_ids=ids))
        for shard, rows in made.items():
            provenance = {
                "target": target.provenance(),
                "settings": {"shards": self.shards},
                "sources": self.serial,
                "shard": shard,
            }
            write_rows(self.results.shard("prompts", self.name, shard), Prompt, rows, provenance)

    def run(self, capfd: pytest.CaptureFixture) -> tuple[int, str]:
        """Make the prompts and answer them all. Returns how many generations that took, and what was said."""
        self.prepare()
        values = {
            "model": MODEL,
            "engine": {"kind": "llamacpp", "endpoints": [self.server.url], "served_model": "target"},
            "lanes": {"short": {"max_tokens": 400, "concurrency": 8}},
            "shards": self.shards,
            "datasets": {self.name: {"class": "B", "source": "made.jsonl"}},
            **self.settings,
        }
        config = self.folder / "config.json"
        config.write_bytes(orjson.dumps(values))
        before = self.asked()
        for number in range(self.shards):
            shard = f"{number:03d}"
            arguments = [
                *("--config", config, "--dataset", self.name, "--shard", shard, "--target", target_folder()),
                *("--prompts", self.results.shard("prompts", self.name, shard)),
                *("--output", self.results.shard("completions", self.name, shard)),
                *("--state", self.results.state.folder),
            ]
            assert generate_completions.main([str(argument) for argument in arguments]) == 0, capfd.readouterr().err
        return self.asked() - before, capfd.readouterr().err

    def asked(self) -> int:
        """Generations that the server has finished, but canaries."""
        canary = answer_digest(load_target(target_folder()).render([Message("user", QUESTION)]))
        return sum(line["prompt"] != canary for line in self.server.served())

    def completions(self) -> list[Completion]:
        return [
            row
            for number in range(self.shards)
            for row in read_rows(self.results.shard("completions", self.name, f"{number:03d}"), Completion)
        ]

    def outputs(self) -> list[list[list[int]]]:
        return sorted([turn.output_ids for turn in row.turns] for row in self.completions())


@pytest.fixture
def project(tmp_path):
    with servers(tmp_path, 1, Answers(9), dialect="llamacpp") as (server,):
        yield Project(tmp_path, server, prompts(40))


def renamed(project: Project) -> None:
    project.name = "talk"


def with_other_ids(project: Project) -> None:
    project.serial = "id column"


def in_two_shards(project: Project) -> None:
    project.shards = 2


def without_state(project: Project) -> None:
    shutil.rmtree(project.results.state.folder)


def only_put_back(project: Project) -> None:
    """As somebody puts back what a store holds, and Snakemake then deletes it as an output of a job to be run."""
    shutil.rmtree(project.results.state.folder)
    adopt(project.results)
    shutil.rmtree(project.results.root / "completions")


def all_at_once(project: Project) -> None:
    for change in (renamed, with_other_ids, in_two_shards):
        change(project)


CHANGES = [renamed, with_other_ids, in_two_shards, without_state, only_put_back, all_at_once]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("turns", [1, 2])
def test_nothing_is_asked_again(tmp_path, project, capfd, change, turns):
    project.rows = prompts(20, turns=turns)
    asked, _ = project.run(capfd)
    assert asked == 20 * turns
    before = project.outputs()
    change(project)
    asked, said = project.run(capfd)
    assert asked == 0, said
    assert project.outputs() == before
    assert all(row.dataset == project.name for row in project.completions())
    if change not in (without_state, only_put_back):
        assert "prompts are answered elsewhere in the run, and are not asked again" in said
        assert any(row.taken_from for row in project.completions())
    # And what has been taken over is the shard's own from now on.
    shutil.rmtree(project.results.root / "completions")
    assert project.run(capfd)[0] == 0
    assert project.outputs() == before


def test_there_and_back_again(project, capfd):
    assert project.run(capfd)[0] == 40
    before = project.outputs()
    for shards in (2, 3, 1, 4, 2):
        project.shards = shards
        assert project.run(capfd)[0] == 0
        assert project.outputs() == before


@pytest.mark.parametrize("change", [renamed, with_other_ids, in_two_shards], ids=lambda change: change.__name__)
def test_a_journal_that_a_killed_job_left_is_enough(project, capfd, change):
    assert project.run(capfd)[0] == 40
    before, state = project.outputs(), project.results.state
    # As it was before the shard was finished: nothing but the journal, with a torn end.
    rows = list(read_rows(state.finished("chat", "000"), Completion))
    state.finished("chat", "000").unlink()
    shutil.rmtree(project.results.root / "completions")
    journal_of(project, rows[:30])
    change(project)
    asked, said = project.run(capfd)
    assert asked == 10, said
    assert project.outputs() == before


def test_a_conversation_that_was_begun_elsewhere_goes_on(project, capfd):
    """Its turns stay findable also when the other shard's job finishes first, and keeps them."""
    project.rows = prompts(20, turns=2)
    assert project.run(capfd)[0] == 40
    before, state = project.outputs(), project.results.state
    rows = list(read_rows(state.finished("chat", "000"), Completion))
    state.finished("chat", "000").unlink()
    shutil.rmtree(project.results.root / "completions")
    answers = reopened(project)
    for row in rows:
        answers.turn(row.id, row.turns[0])
    answers.close()
    in_two_shards(project)
    asked, said = project.run(capfd)
    assert asked == 20, said
    assert project.outputs() == before


def reopened(project: Project) -> ShardAnswers:
    """The answers of the first shard, as its job would write them."""
    path = project.results.state.journal("chat", "000")
    recorded = orjson.loads(path.read_bytes().split(b"\t")[2])
    prompts_path = project.results.shard("prompts", "chat", "000")
    return ShardAnswers(
        project.results.state.folder, "chat", "000", recorded, lambda turn: None, made_from(prompts_path)
    )


def journal_of(project: Project, rows: list[Completion]) -> None:
    answers = reopened(project)
    for row in rows:
        answers.done(row, "http://gone")
    answers.close()
    with open(answers.journal.path, "ab") as file:
        file.write(b'0badc0de\t["done","half')


def test_prompts_of_the_same_words_keep_an_answer_each(project, capfd):
    """The same question three times is asked for three answers: none of them is used twice, whatever moves."""
    project.rows = [row for row in prompts(8) for _ in range(3)]
    assert project.run(capfd)[0] == 24
    before = sorted((row.turns[0].seed, tuple(row.turns[0].output_ids)) for row in project.completions())
    for change in (with_other_ids, in_two_shards, renamed):
        change(project)
        assert project.run(capfd)[0] == 0
        assert sorted((row.turns[0].seed, tuple(row.turns[0].output_ids)) for row in project.completions()) == before


def test_more_prompts_of_the_same_words_are_asked_themselves(project, capfd):
    """An answer that belongs to a prompt of the run is nobody else's."""
    assert project.run(capfd)[0] == 40
    project.rows = project.rows + project.rows[:5]
    assert project.run(capfd)[0] == 5


def test_what_cannot_be_used_is_said_before_it_is_paid(project, capfd):
    assert project.run(capfd)[0] == 40
    renamed(project)
    project.settings = {"sampling": {"temperature": 0.123}}
    asked, said = project.run(capfd)
    assert asked == 40
    assert "has answers to 40 of the prompts left, made with other settings (sampling.temperature: " in said
    assert said.index("other settings") < said.index(" 40 left")


def test_answers_that_nobody_asks_for_any_more_are_counted(project, capfd):
    assert project.run(capfd)[0] == 40
    with_other_ids(project)
    project.rows = project.rows[:30] + prompts(10, seed=1)
    asked, said = project.run(capfd)
    assert asked == 10
    assert "10 answers of earlier runs are to prompts that are none of this run's any more" in said


def test_a_broken_file_is_named_and_stands_in_nobodys_way(project, capfd):
    assert project.run(capfd)[0] == 40
    in_two_shards(project)
    broken = project.results.state.finished("chat", "007")
    broken.write_bytes(b"PAR1 and nothing more")
    asked, said = project.run(capfd)
    assert asked == 0
    assert f"{broken} is not looked through for answers" in said


def test_money_is_counted_where_it_was_paid(project, capfd):
    """Half of the answers are another shard's now: the budget has paid them once."""
    project.settings = {"budget": {"tokens": 1_000_000}}
    project.run(capfd)
    accounts = lambda: sum(  # noqa: E731
        orjson.loads(path.read_bytes())["tokens"] for path in project.results.state.journals.glob("*/*.budget")
    )
    spent = accounts()
    in_two_shards(project)
    for _ in range(2):
        shutil.rmtree(project.results.root / "completions")
        assert project.run(capfd)[0] == 0
        assert accounts() == spent
