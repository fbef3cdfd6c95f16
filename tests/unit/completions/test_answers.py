"""What a shard has answered: resumed by id from journal and finished file, whatever happened in between."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.completions import finished_file, finishing
from scripts.lib.completions.answers import ShardAnswers
from scripts.lib.completions.budget import Account, Amount
from scripts.lib.completions.finishing import conversation, finish, link
from scripts.lib.completions.journal import scan
from scripts.lib.completions.journal_records import Done
from scripts.lib.config.file import parse_config
from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Completion, Message, Prompt, Turn, read_provenance, read_rows, write_rows
from scripts.lib.prompts.shard import prompt_ids, read_prompts

IDENTITY = {"sampling": {"temperature": 0.7}, "max_tokens": 64}


def prompt(name: str, users: int = 1) -> Prompt:
    messages = [Message("system", "Be brief."), *(Message("user", f"{name} {turn}?") for turn in range(users))]
    return Prompt(digest(name), "d", f"made:{name}", name, messages)


def turn(name: str, number: int = 0) -> Turn:
    return Turn([1, 2, 3], [*range(10, 20), 2], "stop", f"{name} {number}!", cost_usd=0.5, seed=number)


def completion(one: Prompt, outcome: str = "ok", turns: int = 1) -> Completion:
    answered = [turn(one.key, number) for number in range(turns)]
    return Completion(one.id, "d", outcome, None if outcome == "ok" else "why", 1, one.messages, answered)


class Shard:
    """One shard in a folder; `run` answers what is left of some prompts."""

    def __init__(self, folder: Path):
        self.state, self.prompts = folder / "state", folder / "prompts.parquet"
        self.output = folder / "out" / "000.parquet"

    def open(self, identity: dict = IDENTITY) -> ShardAnswers:
        return ShardAnswers(self.state, "d", "000", identity, lambda turn: None)

    def write(self, *names: str) -> list[Prompt]:
        rows = [prompt(name) for name in names]
        write_rows(self.prompts, Prompt, rows, {})
        return rows

    def run(self, names: str | list[str], budget: int = 1000) -> list[str]:
        """Answer and finish; returns the keys that had to be asked."""
        self.write(*names)
        answered = self.open()
        asked = []
        for one in read_prompts(self.prompts, lambda id: id not in answered):
            if len(asked) < budget:
                answered.done(completion(one))
                asked.append(one.key)
        finish(answered, self.prompts, self.output, lambda id: "used up", {"engine": "x"})
        answered.close()
        return asked

    def outcomes(self) -> list[str]:
        return [row.outcome for row in read_rows(self.output, Completion)]


@pytest.fixture
def shard(tmp_path):
    return Shard(tmp_path)


def test_finished_rows_come_in_the_prompts_order_with_the_whole_conversation(shard):
    assert shard.run("abc") == list("abc")
    rows = list(read_rows(shard.output, Completion))
    assert [row.id for row in rows] == list(prompt_ids(shard.prompts))
    assert [message.role for message in rows[0].messages] == ["system", "user", "assistant"]
    assert rows[0].messages[2].content == "a 0!"
    provenance = read_provenance(shard.output)
    assert provenance["identity"] == IDENTITY
    assert provenance["engine"] == "x"
    assert provenance["totals"] == sums(3)


def test_a_deleted_output_costs_nothing(shard):
    shard.run("abc")
    before = shard.output.read_bytes()
    shard.output.unlink()
    assert shard.run("abc") == []
    assert shard.output.read_bytes() == before


def test_the_output_is_the_finished_file_itself(shard):
    shard.run("abc")
    assert shard.output.samefile(shard.state / "completions/d/000.parquet")


def test_only_new_prompts_are_asked_and_old_answers_wait_for_their_prompts(shard):
    assert shard.run("abc") == list("abc")
    assert shard.run("bcde") == list("de")
    assert len(shard.outcomes()) == 4
    unused = list(read_rows(shard.state / "completions/d/000.unused.parquet", Completion))
    assert [row.id for row in unused] == [prompt("a").id]
    assert unused[0].messages[2].content == "a 0!"
    assert shard.run("ea") == []
    assert shard.run("abcde") == []
    assert not (shard.state / "completions/d/000.unused.parquet").exists()


def sums(answers: int) -> dict:
    return {
        "outcomes": {"ok": answers} if answers else {},
        "input_tokens": 3 * answers,
        "output_tokens": 11 * answers,
        "cost_usd": 0.5 * answers,
        "paid": {"tokens": 14 * answers, "cost_usd": 0.5 * answers},
    }


@pytest.mark.parametrize("names", ["abc", "ab", "bcde", "de", "aef"])
def test_only_the_answers_to_prompts_of_the_shard_are_counted(shard, names):
    """From the finished file, the unused answers and the journal; prompts that left are not among them."""
    shard.run("abc")
    shard.run("bcd")  # a is unused now
    rows = shard.write(*"bcde")
    answered = shard.open()
    answered.done(completion(rows[3]))
    answered.close()
    shard.write(*names)
    answered = shard.open()
    known = set("abcde") & set(names)
    total, count, totals = answered.count(shard.prompts)
    assert (total, count, totals.plain()) == (len(names), len(known), sums(len(known)))
    answered.close()


def test_killed_before_the_end_only_what_is_missing_is_asked(shard):
    rows = shard.write("a", "b", "c")
    answered = shard.open()
    answered.done(completion(rows[1]))
    answered.journal.write()
    answered.close()
    answered = shard.open()
    assert answered.totals.plain() == sums(1)
    answered.close()
    assert shard.run("abc") == ["a", "c"]


@pytest.mark.parametrize("moment", ["write_finished", "empty_journal", "link"])
def test_killed_while_finishing_nothing_is_asked_again(shard, monkeypatch, moment):
    """Finished file, journal, declared output: between any two of them the job may die."""

    def die(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finishing, moment, die)
        with pytest.raises(KeyboardInterrupt):
            shard.run("abc")
    assert not shard.output.exists()
    release_lock(shard)
    answered = shard.open()
    assert answered.totals.plain() == sums(3)  # once, though they stand in two files for a while
    answered.close()
    assert shard.run("abc") == []
    assert shard.outcomes() == ["ok"] * 3


def release_lock(shard: Shard) -> None:
    """Close the descriptors of a job that "died" within this process, as the kernel would."""
    lock = shard.state / "journals/d/000.journal.lock"
    for number in os.listdir("/proc/self/fd"):
        try:
            if Path(os.readlink(f"/proc/self/fd/{number}")) == lock:
                os.close(int(number))
        except OSError:
            continue


def test_over_budget_prompts_are_asked_when_there_is_money(shard):
    assert shard.run("abcd", budget=2) == ["a", "b"]
    assert shard.outcomes() == ["ok", "ok", "over_budget", "over_budget"]
    assert [row.reason for row in read_rows(shard.output, Completion)][2] == "used up"
    assert shard.run("abcd") == ["c", "d"]
    assert shard.outcomes() == ["ok"] * 4


def test_turns_of_a_conversation_that_ran_out_of_budget_are_kept(shard):
    rows = [prompt("a", users=3), prompt("b")]
    write_rows(shard.prompts, Prompt, rows, {})
    answered = shard.open()
    answered.turn(rows[0].id, turn("a", 0))
    answered.part(rows[0].id, turn("a", 1))
    answered.done(completion(rows[1]))
    finish(answered, shard.prompts, shard.output, lambda id: "used up", {})
    answered.close()
    answered = shard.open()
    partial = answered.partial[rows[0].id]
    assert [one.content for one in partial.turns] == ["a 0!"]
    assert partial.part.content == "a 1!"
    answered.close()


def test_a_turn_makes_the_truncated_answer_before_it_obsolete(shard):
    rows = shard.write("a")
    answered = shard.open()
    answered.part(rows[0].id, turn("a", 0))
    answered.turn(rows[0].id, turn("a", 1))
    answered.close()
    answered = shard.open()
    assert answered.partial[rows[0].id].part is None
    answered.close()


def test_void_answers_are_asked_again(shard):
    """What one endpoint answered since a position, in part or whole, and nothing else."""
    names = "abcdefg"
    early, mine, other, begun, mixed, looped, failed = rows = shard.write(*names)
    ids = {row.id: name for row, name in zip(rows, names)}
    answered = shard.open()
    broken, well = "http://broken", "http://well"
    answered.done(completion(early), broken)  # proven by a canary
    answered.turn(other.id, replace(turn("c"), endpoint=broken))  # this turn as well
    since = answered.journal.position
    answered.done(completion(mine), broken)
    answered.done(completion(other), well)
    answered.turn(begun.id, replace(turn("d"), endpoint=broken))
    answered.part(mixed.id, replace(turn("e"), endpoint=broken))
    answered.done(completion(mixed), well)  # the rest came from elsewhere
    answered.done(completion(looped, "repetition", turns=0), broken)
    answered.done(completion(failed, "exhausted", turns=0))
    counts, under_way = answered.void(broken, since)
    assert {ids[prompt_id]: done.outcome for prompt_id, done in counts.items()} == {
        "b": "ok",
        "e": "ok",
        "f": "repetition",
    }
    assert counts[mine.id] == Done(mine.id, "ok", 3, 11, 0.5, broken, 14)
    assert under_way == {begun.id}
    assert answered.void(broken, since) == ({}, set())
    answered.close()
    answered = shard.open()
    assert [ids[row.id] for row in rows if row.id in answered] == ["a", "c", "g"]
    assert answered.partial == {}
    assert answered.totals.plain()["outcomes"] == {"ok": 2, "exhausted": 1}
    answered.close()
    assert shard.run(names) == ["b", "d", "e", "f"]


def test_everybody_gets_his_own_answer_when_prompts_return_while_others_leave(shard, monkeypatch):
    """The file of unused answers is written anew while answers are taken from it."""
    monkeypatch.setattr(records, "ROWS_PER_GROUP", 64)  # more groups than are kept in memory
    monkeypatch.setattr(finished_file, "_GROUPS", 1)
    first, second, third = ([f"{part}{number}" for number in range(200)] for part in "abc")
    for names in (first + second + third, first + second, first + third, first + second + third):
        shard.run(names)
        rows = list(read_rows(shard.output, Completion))
        assert [row.id for row in rows] == [digest(name) for name in names]
        assert [row.turns[0].content for row in rows] == [f"{name} 0!" for name in names]


def test_what_was_voided_stays_so_though_it_stands_in_the_finished_file(shard, monkeypatch):
    """A job was killed between the finished file and the emptied journal; the next one voids, and is killed as well."""
    rows = shard.write(*"abc")
    answered = shard.open()
    for row in rows:
        answered.done(completion(row), "http://broken")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finishing, "empty_journal", lambda answers: exec("raise KeyboardInterrupt"))
        finish(answered, shard.prompts, shard.output, lambda id: None, {})
    answered.close()
    rows = shard.write(*"abcd")
    answered = shard.open()
    assert len(answered.void("http://broken", 0)[0]) == 3
    answered.close()
    answered = shard.open()
    assert [row.id in answered for row in rows] == [False] * 4
    assert answered.totals.plain() == sums(0)
    assert answered.unproven() == {}
    answered.close()
    assert shard.run("abcd") == list("abcd")


def test_remains_of_a_kill_while_finishing_are_removed(shard):
    shard.run("ab")
    remains = shard.state / "completions/d/.000.parquet.4711.partial"
    remains.write_bytes(b"half")
    shard.run("abc")
    assert not remains.exists()


def test_a_prompt_without_outcome_is_an_error_not_a_hole(shard):
    rows = shard.write("a", "b")
    answered = shard.open()
    answered.done(completion(rows[0]))
    with pytest.raises(UserError, match=rf"made:b: prompt {rows[1].id} has no outcome"):
        finish(answered, shard.prompts, shard.output, lambda id: None, {})
    answered.close()
    assert not shard.output.exists()


def test_a_prompt_that_comes_twice_is_an_error(shard):
    shard.write("a", "a")
    answered = shard.open()
    for one in read_prompts(shard.prompts, lambda id: True):
        answered.done(completion(one))
    with pytest.raises(UserError, match="1 different prompts, 2 outcomes"):
        finish(answered, shard.prompts, shard.output, lambda id: None, {})
    answered.close()


@pytest.mark.parametrize("finished", [False, True])
def test_answers_of_other_settings_are_refused_by_name(shard, finished):
    if finished:
        shard.run("ab")
    else:
        rows = shard.write("a")
        answered = shard.open()
        answered.done(completion(rows[0]))
        answered.close()
    with pytest.raises(
        UserError, match=r"sampling.temperature: 0.7 -> 1.0.*move .*journals/d and .*completions/d away"
    ):
        shard.open({"sampling": {"temperature": 1.0}, "max_tokens": 64})
    shard.open().close()


def test_other_settings_are_fine_while_nothing_was_answered(shard):
    other = {"sampling": {"temperature": 1.0}, "max_tokens": 64}
    shard.open().close()
    shard.open(other).close()
    (line,) = scan(shard.state / "journals/d/000.journal")
    assert b'"temperature":1.0' in line.body


def test_prompts_are_read_as_they_were_written(tmp_path):
    rows = [prompt("a", 3), Prompt(digest("b"), "d", "s", "k", [Message("user", "x", "y", "[]")], '[{"z": 1}]', 7)]
    rows += [prompt(str(number)) for number in range(600)]
    write_rows(tmp_path / "p.parquet", Prompt, rows, {})
    assert list(read_prompts(tmp_path / "p.parquet", lambda id: True)) == rows
    wanted = {rows[1].id, rows[400].id}
    assert list(read_prompts(tmp_path / "p.parquet", wanted.__contains__)) == [rows[1], rows[400]]


def test_conversation_ends_where_the_answers_do():
    messages = [Message("user", "1"), Message("user", "2"), Message("user", "3")]
    whole = conversation(messages, [turn("x", 0), turn("x", 1)])
    assert [message.content for message in whole] == ["1", "x 0!", "2", "x 1!", "3"]
    assert conversation(whole, [turn("x", 0), turn("x", 1)]) == whole


def test_link_falls_back_to_a_copy(tmp_path, monkeypatch):
    def elsewhere(*arguments):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    source, output = tmp_path / "a", tmp_path / "x" / "b"
    source.write_text("rows")
    link(source, output)
    assert output.read_text() == "rows"
    assert not output.samefile(source)


def test_the_next_job_knows_what_no_canary_has_proven(shard):
    rows = shard.write("a", "b", "c", "d", "e")
    one, other = "http://one", "http://other"
    answered = shard.open()
    answered.done(completion(rows[0]), one)
    answered.turn(rows[1].id, replace(turn("b"), endpoint=other))
    proven = answered.journal.position
    answered.done(completion(rows[2]), one)  # while the canary was out
    answered.prove(one, proven)
    answered.done(completion(rows[3]), one)
    answered.done(completion(rows[4], "exhausted", turns=0))
    answered.journal.close()  # and no end in order
    answered = shard.open()
    left = answered.unproven()
    assert {endpoint: count for endpoint, (count, _) in left.items()} == {one: 2, other: 1}
    assert left[one][1] == proven
    counts, _ = answered.void(one, left[one][1])
    assert counts.keys() == {rows[2].id, rows[3].id}
    answered.close()


@pytest.mark.parametrize("counted", [5, 40])
def test_reopening_a_shard_spends_nothing(shard, counted):
    """An API counts other tokens than stand in the rows: the account goes on counting as the API does."""
    config = parse_config({"datasets": {"d": {"class": "B", "source": "x"}}, "budget": {"tokens": 1_000_000}}, "here")
    rows = shard.write("a", "b", "c")
    spent = []
    for finishes in (False, True, True):
        answered = shard.open()
        account = Account(shard.state, config, "d", "000", answered.paid)
        if not spent:
            answered.done(replace(completion(rows[0]), turns=[replace(turn("a"), billed_tokens=counted)]))
            answered.turn(rows[1].id, replace(turn("b"), billed_tokens=counted))
            account.settle(Amount(), Amount(2 * counted, 1.0))
            account.save(give_back=True)
        elif finishes:
            finish(answered, shard.prompts, shard.output, lambda prompt_id: "used up", {})
        spent.append(account.spent)
        answered.close()
    assert spent == [Amount(2 * counted, 1.0)] * 3


def test_packed_turns_are_journalled_as_the_ids_that_they_are(shard):
    rows = shard.write("a")
    whole = completion(rows[0], turns=2)
    for one in whole.turns:
        one.pack()
    assert whole.turns[0].prompt_ids.nbytes == 4 * 3
    answered = shard.open()
    answered.done(whole)
    finish(answered, shard.prompts, shard.output, lambda prompt_id: None, {})
    answered.close()
    assert [(one.prompt_ids, one.output_ids) for row in read_rows(shard.output, Completion) for one in row.turns] == [
        (turn("a").prompt_ids, turn("a").output_ids)
    ] * 2
