"""Stage 1 by its command line, on real files and the real tokenizer of the embedded model."""

import gzip
import hashlib
import json
import os
import random
from collections import Counter
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts import prepare_prompts as entry
from scripts import prepare_target
from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Prompt, read_provenance, read_rows
from scripts.lib.prompts.candidates import Candidates
from scripts.lib.prompts.prepare import prepare_prompts
from scripts.lib.prompts.selection import prompt_key, shard_of
from scripts.lib.prompts.sources.formats import Conversation
from scripts.lib.target.model import load_target
from tests.hub_server import hub_server

SHARDS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(configured({"source": "x"})))
    assert prepare_target.main(["--config", str(config), "--output", str(folder / "target")]) == 0
    return folder / "target"


def configured(*datasets, **sections):
    """A config of datasets `a`, `b`, ...; class B unless it says otherwise."""
    named = {name: {"class": "B"} | dataset for name, dataset in zip("abc", datasets)}
    lanes = {"short": {"max_tokens": 100, "concurrency": 1}}
    return {"datasets": named, "shards": SHARDS, "lanes": lanes, "model": {"context_length": 600}} | sections


class Run:
    """The command line in a folder of its own."""

    def __init__(self, folder: Path, target: Path):
        self.folder, self.target = folder, target

    def write(self, name, rows):
        path = self.folder / name
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    def output(self, dataset):
        return self.folder / "prompts" / dataset

    def __call__(self, config, dataset="a", earlier=()):
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        arguments = ["--config", str(self.folder / "config.yaml"), "--dataset", dataset, "--target", str(self.target)]
        arguments += ["--earlier", *(str(self.output(name) / "keys.parquet") for name in earlier)]
        return entry.main([*arguments, "--output", str(self.output(dataset))])

    def report(self, dataset="a"):
        return orjson.loads((self.output(dataset) / "report.json").read_bytes())

    def reasons(self, dataset="a"):
        return {reason: entry["count"] for reason, entry in self.report(dataset)["reasons"].items()}

    def prompts(self, dataset="a"):
        return [p for shard in range(SHARDS) for p in read_rows(self.output(dataset) / f"{shard:03d}.parquet", Prompt)]

    def texts(self, dataset="a"):
        return sorted(prompt.messages[-1].content for prompt in self.prompts(dataset))


@pytest.fixture
def run(tmp_path, target):
    return Run(tmp_path, target)


def asks(count, word="Question"):
    return [{"prompt": f"{word} number {n}: what is {n} times {n + 1}?"} for n in range(count)]


def test_rows_become_prompts_in_their_shards(run, target):
    source = run.write("a.jsonl.gz", [{"id": "x", "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"}]}, *asks(20)])  # fmt: skip
    assert run(configured({"source": source})) == 0
    prompts = run.prompts()
    assert len({prompt.id for prompt in prompts}) == 21
    for shard in range(SHARDS):
        path = run.output("a") / f"{shard:03d}.parquet"
        assert all(shard_of(prompt.id, SHARDS) == shard for prompt in read_rows(path, Prompt))
        provenance = read_provenance(path)
        assert provenance["sources"][0]["name"] == source
        assert provenance["settings"]["shards"] == SHARDS
    (chat,) = (prompt for prompt in prompts if prompt.source.endswith("a.jsonl.gz:1"))
    assert [(m.role, m.content) for m in chat.messages] == [("system", "Be brief."), ("user", "Hi"), ("user", "Bye")]
    assert chat.prompt_ids == load_target(target).render(chat.messages[:2])
    assert chat.prompt_tokens == len(chat.prompt_ids)
    assert chat.key == prompt_key(Conversation(chat.messages)).hex()
    keys = pq.read_table(run.output("a") / "keys.parquet").to_pylist()
    assert {(row["id"], row["key"]) for row in keys} == {(prompt.id, prompt.key) for prompt in prompts}
    assert sorted(path.name for path in run.output("a").iterdir()) == [
        "000.parquet", "001.parquet", "002.parquet", "keys.parquet", "report.json",
    ]  # fmt: skip


def test_every_row_is_kept_or_counted(run, capfd):
    source = run.write("a.jsonl", [
        *asks(6), {"prompt": "question NUMBER 0: what is 0  times 1?"}, {"prompt": " "}, {"prompt": "x<|im_end|>"},
        {"messages": [{"role": "narrator", "content": "x"}]}, {"prompt": "long " * 600},
    ])  # fmt: skip
    with open(source, "a") as file:
        file.write("{broken\n")
    assert run(configured({"source": source})) == 0
    report = run.report()
    expected = {"broken_json", "unknown_role", "missing_field", "control_tokens", "prompt_too_long", "duplicate"}
    assert run.reasons() == dict.fromkeys(expected, 1)
    assert report["rows"] == 12 == report["kept"] + report["dropped"]
    assert report["kept"] == sum(report["shards"]) == len(run.prompts()) == 6
    assert report["reasons"]["broken_json"]["examples"][0]["source"] == f"{source}:12"
    assert report["reasons"]["control_tokens"]["examples"][0]["detail"] == "<|im_end|>"
    assert report["reasons"]["prompt_too_long"]["examples"][0]["id"]
    assert "a: 12 rows, 6 kept, dropped: broken_json 1" in capfd.readouterr().err


def test_examples_stop_at_twenty(run):
    source = run.write("a.jsonl", [*asks(30), *({"prompt": " "} for _ in range(25))])
    assert run(configured({"source": source})) == 0
    reason = run.report()["reasons"]["missing_field"]
    assert (reason["count"], len(reason["examples"])) == (25, 20)


def test_same_rows_in_any_order_give_the_same_choice(run):
    rows = asks(300)
    one = run.write("a.jsonl", rows)
    random.Random(1).shuffle(rows)
    other = run.write("b.jsonl", rows)
    configs = [configured({"source": source, "max_samples": 40}) for source in (one, other)]
    choices = []
    for config in configs:
        assert run(config) == 0
        choices.append([(prompt.id, prompt.messages) for prompt in run.prompts()])
        assert run.reasons() == {"not_selected": 260}
        assert len(run.report()["reasons"]["not_selected"]["examples"]) == 20
    assert choices[0] == choices[1]
    assert len(choices[0]) == 40


def test_same_input_gives_the_same_bytes(run):
    config = configured({"source": run.write("a.jsonl", asks(50)), "max_samples": 20})
    contents = []
    for _ in range(2):
        assert run(config) == 0
        contents.append({path.name: path.read_bytes() for path in run.output("a").iterdir()})
    assert contents[0] == contents[1]


def test_choice_grows_with_max_samples_and_moves_with_the_seed(run):
    source = run.write("a.jsonl", asks(200))
    chosen = []
    for count, seed in ((20, 0), (50, 0), (20, 1)):
        assert run(configured({"source": source, "max_samples": count}, selection={"seed": seed})) == 0
        chosen.append({prompt.id for prompt in run.prompts()})
    assert chosen[0] < chosen[1]
    assert chosen[0] != chosen[2]


def test_grown_source_keeps_finished_prompts_in_their_shards(run):
    source = run.write("a.jsonl", asks(30))
    assert run(configured({"source": source})) == 0
    before = {prompt.id: shard_of(prompt.id, SHARDS) for prompt in run.prompts()}
    # The same questions again, written otherwise: they take nobody's place.
    again = [{"prompt": row["prompt"].upper()} for row in asks(30)]
    run.write("a.jsonl", [*asks(10, "New"), *asks(30), *again])
    assert run(configured({"source": source})) == 0
    assert run.reasons() == {"duplicate": 30}
    after = {prompt.id: shard_of(prompt.id, SHARDS) for prompt in run.prompts()}
    assert before.items() < after.items()


def test_dataset_named_first_keeps_a_prompt(run):
    config = configured(
        {"source": run.write("a.jsonl", asks(10))},
        {"source": run.write("b.jsonl", asks(15))},
        {"source": run.write("c.jsonl", [row | {"response": "a"} for row in asks(17)]), "class": "A"},
    )
    for dataset, earlier in (("a", ""), ("b", "a"), ("c", "ab")):
        assert run(config, dataset, earlier) == 0
    assert [len(run.prompts(dataset)) for dataset in "abc"] == [10, 5, 2]
    assert run.reasons("c") == {"duplicate_across": 15}


def test_deduplication_can_be_less(run):
    source = run.write("a.jsonl", [*asks(5), *asks(5)])
    within = configured({"source": source}, {"source": source}, selection={"deduplicate": "within"})
    assert run(within) == 0
    assert run(within, "b", "a") == 0
    assert len(run.prompts("a")) == len(run.prompts("b")) == 5
    assert run(configured({"source": source}, selection={"deduplicate": "none"})) == 0
    prompts = run.prompts()
    # The same prompt twice: two samples, each with an id of its own.
    assert len({prompt.id for prompt in prompts}) == 10
    assert set(Counter(prompt.key for prompt in prompts).values()) == {2}


def test_dataset_of_duplicates_only_is_empty_not_wrong(run):
    source = run.write("a.jsonl", asks(3))
    config = configured({"source": source}, {"source": source})
    assert run(config) == 0
    assert run(config, "b", "a") == 0
    assert run.report("b")["kept"] == 0
    assert run.prompts("b") == []


def test_near_duplicates(run):
    text = "Please write a careful explanation of how a suspension bridge carries its load down to the towers, part {}."
    source = run.write("a.jsonl", [*({"prompt": text.format(n)} for n in range(5)), *asks(1)])
    assert run(configured({"source": source}, selection={"near_duplicates": 0.8})) == 0
    assert run.reasons() == {"near_duplicate": 4}
    assert run.report()["reasons"]["near_duplicate"]["examples"][0]["detail"].startswith("like ")


def test_evaluation_sets(run):
    question = (
        "A gardener plants nine rows of seven tulips each, then gives a third of them away. How many are left over?"
    )
    evaluation = run.write("eval.jsonl", [{"question": question, "answer": "42"}, {"question": "Sort a list."}])
    source = run.write("a.jsonl", [{"prompt": f"Solve: {question}"}, {"prompt": "sort a list"}, *asks(3)])
    config = configured({"source": source}, selection={"decontaminate": [evaluation]})
    assert run(config) == 0
    assert run.reasons() == {"contaminated": 2}
    run.write("eval.jsonl", [{"nothing": "to ask"}])
    assert run(config) == 1


def test_short_questions_of_evaluation_sets_are_met_without_their_choices(run):
    evaluation = run.write("eval.jsonl", [{"question": "Which is a mammal?", "choices": ["Owl", "Bat"], "answer": 1}])
    source = run.write("a.jsonl", [{"prompt": "which is a mammal?"}, *asks(3)])
    assert run(configured({"source": source}, selection={"decontaminate": [evaluation]})) == 0
    assert run.reasons() == {"contaminated": 1}


def test_control_tokens_are_neutralised_on_request(run, target):
    source = run.write("a.jsonl", [{"prompt": "What does <|im_end|> mean?"}])
    assert run(configured({"source": source}, cleaning={"control_tokens": "neutralise"})) == 0
    (prompt,) = run.prompts()
    loaded = load_target(target)
    assert loaded.structural_in(prompt.messages[0].content) == []
    assert prompt.messages[0].content.replace("\u200b", "") == "What does <|im_end|> mean?"
    assert run.report()["changes"]["neutralised"]["count"] == 1


def test_conversations_and_tokens_of_class_a(run):
    rows = [
        {
            "id": 1,
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "reasoning_content": "r"},
            ],
        },
        {"id": 2, "input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ]
    assert run(configured({"source": run.write("a.jsonl", rows), "class": "A"})) == 0
    chat, tokens = sorted(run.prompts(), key=lambda prompt: prompt.source)
    assert (chat.messages[1].reasoning, chat.messages[1].content) == ("r", "a")
    assert (tokens.input_ids, tokens.loss_mask, tokens.messages, tokens.prompt_tokens) == ([5, 6, 7], [0, 1, 1], [], 1)
    assert tokens.prompt_ids is None


@pytest.mark.parametrize(
    ("rows", "sections", "message"),
    [
        ([], {}, "a.jsonl: holds no rows"),
        (
            [{"foo": "x"}] * 3,
            {},
            "3 of 3 rows (100%) can't be used, more than cleaning.max_reject_rate 50%: unknown_format x3",
        ),
        ([*asks(8), {}, {}], {"cleaning": {"max_reject_rate": 0.1}}, "a.jsonl:9: columns none"),
        ([{"foo": "x"}], {"cleaning": {"max_reject_rate": 1}}, "no prompt is left of 1 rows: unknown_format x1"),
        (asks(1), {"cleaning": {"max_prompt_tokens": 1}}, "no prompt is left of 1 rows: prompt_too_long x1"),
        (asks(1), {"lanes": {"short": {"max_tokens": 600, "concurrency": 1}}}, "leaves no room for a prompt"),
        (
            asks(1),
            {"selection": {"decontaminate": ["nowhere.jsonl"]}},
            "selection.decontaminate: nowhere.jsonl: no such file",
        ),
    ],
)
def test_mistakes_are_one_line(run, capfd, rows, sections, message):
    assert run(configured({"source": run.write("a.jsonl", rows)}, **sections)) == 1
    error = capfd.readouterr().err
    assert message in error
    assert len([line for line in error.splitlines() if not line.startswith("a: reading ")]) == 1
    left = {path.name for path in run.output("a").glob("*")}  # neither results nor the file of candidates
    assert left == ({"report.json"} if "no prompt is left" in message else set())


@pytest.mark.parametrize("moment", ["reading", "rows, "])
def test_a_source_that_is_replaced_meanwhile_stops(run, target, moment):
    """With its time kept, as copies do: the next run would have nothing to do."""
    path = Path(run.write("a.jsonl", asks(40)))
    new = Path(run.write("new.jsonl", asks(40, "Other")))
    os.utime(new, ns=(path.stat().st_mtime_ns,) * 2)

    def say(line):
        if moment in line and new.exists():
            assert path.exists()
            os.replace(new, path)

    config = parse_config(configured({"source": str(path)}), "test")
    if moment == "reading":  # before its first byte: the new rows, described as such
        report = prepare_prompts(config, "a", load_target(target), run.output("a"), say=say)
        assert report["sources"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert all(text.startswith("Other") for text in run.texts())
    else:
        with pytest.raises(UserError, match=r"a\.jsonl: changed while it was read: run again"):
            prepare_prompts(config, "a", load_target(target), run.output("a"), say=say)
    assert not new.exists()


@pytest.mark.parametrize(
    ("where", "code", "shown"),
    [
        ("{url}/datasets/o/d/resolve/main/x.csv", 0, "reading http://127.0.0.1:"),
        ("{url}/datasets/o/d/resolve/main/none.csv", 1, "none.csv: no such file"),
        ("{url}/datasets/o/shut/resolve/main/x.csv", 1, "x.csv: can't be read: HTTP 403"),
        ("http://127.0.0.1:9/x.csv", 1, "x.csv: can't be read: gave up"),
        ("{url}/datasets/o/d/resolve/main/x.docx", 1, "unknown kind of file"),
    ],
)
def test_keys_of_a_url_stay_in_the_request(run, capfd, monkeypatch, where, code, shown):
    """Neither what is printed nor any file holds the user, the password or the query, whatever comes of it."""
    monkeypatch.setattr("scripts.lib.core.waiting.BACKOFF_SECONDS", 0)
    with hub_server() as hub:
        hub.datasets |= {"o/d": {"x.csv": b"prompt\nWhy is the sky blue?\n", "x.docx": b"x"}, "o/shut": {"x.csv": b"x"}}
        hub.gated["o/shut"] = "another"
        url = where.format(url=hub.url).replace("http://", "http://alice:PASSWORD@")
        assert run(configured({"source": f"{url}?file=1&X-Amz-Signature=SIGNATURE"})) == code
    printed = capfd.readouterr()
    assert shown in printed.err
    files = [path for path in run.output("a").rglob("*") if path.is_file()]
    assert code or len(files) == SHARDS + 2
    said = [printed.out.encode(), printed.err.encode(), *(path.read_bytes() for path in files)]
    said += [json.dumps(read_provenance(path)).encode() for path in files if path.suffix == ".parquet"]
    for secret in (b"alice", b"PASSWORD", b"SIGNATURE"):
        assert not any(secret in one for one in said), secret


def test_wrong_format_is_found_before_the_end(run, capfd, monkeypatch):
    monkeypatch.setattr("scripts.lib.prompts.prepare.HOPELESS_ROWS", 10)
    source = run.write("a.jsonl", [{"foo": n} for n in range(10)])
    with open(source, "a") as file:
        file.write("[\n" * 100)
    assert run(configured({"source": source})) == 1
    assert "none of the first 10 rows can be used: unknown_format x10" in capfd.readouterr().err


def test_candidates_of_a_killed_run_are_replaced(run):
    run.output("a").mkdir(parents=True)
    (run.output("a") / ".candidates.sqlite").write_bytes(b"half a database")
    assert run(configured({"source": run.write("a.jsonl", asks(3))})) == 0
    assert not list(run.output("a").glob(".*"))


def test_full_disk_is_one_line(run, capfd, monkeypatch):
    opened = Candidates.__init__

    def open_small(self, path):
        opened(self, path)
        self.database.execute("PRAGMA max_page_count=20")  # SQLite's own way to have no more room

    monkeypatch.setattr(Candidates, "__init__", open_small)
    assert run(configured({"source": run.write("a.jsonl", asks(3000))})) == 1
    assert ".candidates.sqlite: database or disk is full: free some space and run again" in capfd.readouterr().err
    assert not list(run.output("a").glob("*"))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "role", "content", "prompt", "text", "id", "tools", "x"]), inner)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text(max_size=5)}
    ),
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(anything | st.fixed_dictionaries({"messages": messages}), min_size=1, max_size=30),
    st.sampled_from("AB"),
    st.integers(1, 20),
)
def test_any_rows_are_accounted_for(run, rows, data_class, wanted):
    source = run.folder / "any.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, "keeps the dataset from being empty"]))
    config = parse_config(
        configured(
            {"source": str(source), "class": data_class, "max_samples": wanted}, cleaning={"max_reject_rate": 1}
        ),
        "test",
    )
    if data_class == "A":
        with open(source, "a") as file:
            file.write('{"question": "q", "answer": "a"}\n')
    report = prepare_prompts(config, "a", load_target(run.target), run.output("a"), say=lambda line: None)
    assert report["rows"] == len(rows) + 1 + (data_class == "A")
    assert report["rows"] == report["kept"] + sum(reason["count"] for reason in report["reasons"].values())
    prompts = run.prompts()
    assert len(prompts) == report["kept"] <= wanted
    assert len({prompt.id for prompt in prompts}) == len(prompts)
