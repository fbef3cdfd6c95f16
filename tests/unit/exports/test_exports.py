import ast
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from scripts import export_training
from scripts.lib.core import records
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.exports import FORMATS, export, json_lines
from scripts.lib.exports.conversations import openai_calls
from scripts.lib.training.manifest import read_manifest
from tests.conversations import CALL, TOOLS, answered, with_tools
from tests.corpora import config, corpus, rows_of, sample, shard


def lines_of(file):
    return [json.loads(line) for line in file.read_bytes().splitlines()]


@pytest.fixture
def make(tmp_path, target):
    """Make a corpus of these samples; returns a function that exports it and gives report, rows and folder."""

    def made(samples):
        paths = [shard(tmp_path / "alpha/000.parquet", samples, target.provenance())]
        corpus(tmp_path, config(("alpha",)), paths)

        def exported(name):
            report = export(name, tmp_path / "training", target, tmp_path / name, say=lambda line: None)
            rows = [row for file in sorted((tmp_path / name / "data").glob("*.jsonl")) for row in lines_of(file)]
            written = json.loads((tmp_path / name / "export.json").read_text())
            assert written["read"] == len(samples)
            assert report.as_json() == written
            return written, rows, tmp_path / name

        return exported

    return made


def test_tokens_are_verbatim_in_corpus_order(make, target, tmp_path):
    exported = make([answered(target, number, turns=1 + number % 3) for number in range(20)])
    report, rows, _ = exported("tokens")
    merged = rows_of(tmp_path / "training")
    assert rows == [{"input_ids": row.input_ids, "loss_mask": row.loss_mask} for row in merged]
    assert max(len(row.input_ids) for row in merged) in report["settings"].values()
    assert report["lost"] == report["left_out"] == {}


def test_files_have_a_limited_size(make, target, monkeypatch):
    monkeypatch.setattr(json_lines, "FILE_BYTES", 2000)
    _, rows, folder = make([answered(target, number) for number in range(20)])("tokens")
    files = sorted((folder / "data").iterdir())
    assert len(files) > 3
    assert all(file.stat().st_size <= 2000 for file in files)
    assert len(rows) == 20


def test_conversations_come_one_row_per_answer(make, target):
    exported = make([answered(target, 1, turns=3), answered(target, 2)])
    report, rows, _ = exported("specforge")
    by_id = {row["id"]: row["conversations"] for row in rows}
    one, two = f"{1:032x}", f"{2:032x}"
    assert set(by_id) == {f"{one}/0", f"{one}/1", f"{one}/2", f"{two}/0"}
    assert [len(by_id[f"{one}/{answer}"]) for answer in range(3)] == [2, 4, 6]
    assert {turn["role"] for turn in by_id[f"{one}/2"]} == {"user", "assistant"}
    assert report["settings"] == {"data.train_only_last_turn": True}
    assert report["rows"] == 4
    assert "0 of 2 conversations checked give other ids" in report["notes"][0]


def test_a_sample_of_a_later_turn_yields_that_turn_alone(make, target):
    """Turns of thinking models don't merge: each is a sample whose earlier answers are context."""
    whole = answered(target, 1, turns=2)
    first_answer = whole.loss_mask.index(0, whole.loss_mask.index(1))
    later = [0] * first_answer + whole.loss_mask[first_answer:]
    exported = make([answered(target, 1, turns=2, id=f"{1:032x}/1", loss_mask=later)])
    _, rows, _ = exported("specforge")
    assert [row["id"] for row in rows] == [f"{1:032x}/1"]
    report, rows, _ = exported("deepspec")
    assert [row["id"] for row in rows] == [f"{1:032x}/1"]
    assert report["lost"]["mask of earlier answers: the trainer learns them again in this row"] == 1


def test_answers_that_are_not_to_be_learnt_get_no_row(make, target):
    whole = answered(target, 1, turns=2)
    whole.messages[1].trainable = False
    begins = whole.loss_mask.index(1)
    ends = whole.loss_mask.index(0, begins)
    whole.loss_mask[begins:ends] = [0] * (ends - begins)
    exported = make([whole])
    assert [row["id"] for row in exported("specforge")[1]] == [f"{1:032x}/1"]
    report, rows, _ = exported("deepspec")
    assert len(rows[0]["conversations"]) == 4
    assert report["lost"]["mask of earlier answers: the trainer learns them again in this row"] == 1
    lost = exported("eagle")[0]["lost"]
    assert lost["mask of answers that are not to be learnt: the trainer learns them"] == 1


def test_ids_that_text_does_not_give_back_are_counted(make, target):
    good, other = answered(target, 1), answered(target, 2)
    other.input_ids[-2] += 1
    report, _, _ = make([good, other])("specforge")
    assert report["notes"][0].startswith("1 of 2 conversations checked give other ids")


def test_samples_with_every_optional_key_come_first(make, target):
    """`datasets` fixes the columns by the first block that it reads."""
    report, rows, _ = make([*(answered(target, number) for number in range(50)), with_tools(target, 99)])("specforge")
    assert {tuple(sorted(row)) for row in rows} == {("conversations", "id", "tools")}
    _, call, result, last = rows[0]["conversations"]
    assert call["reasoning_content"] == "I need the weather."
    assert json.loads(call["tool_calls"])[0]["function"]["arguments"] == '{"city":"Brno","days":2}'
    assert result["tool_call_id"] == json.loads(call["tool_calls"])[0]["id"]
    assert last["reasoning_content"] is None
    assert rows[0]["tools"] == TOOLS
    assert rows[1]["tools"] == "[]"
    assert len(rows) == report["rows"]


def test_results_keep_the_ids_and_names_of_their_source(make, target):
    whole = with_tools(target, 1)
    question, call, result, last = whole.messages
    call.tool_calls = '[{"id": "r2", "function": {"name": "f"}}, {"id": "d2", "function": {"name": "g"}}]'
    other = Message("tool", "Sun.", name="g", tool_call_id="d2")
    result.name, result.tool_call_id = "f", "r2"
    whole.messages = [question, call, other, result, last]
    _, rows, _ = make([whole, answered(target, 2)])("messages")
    turns = next(row["messages"] for row in rows if len(row["messages"]) == 5)
    assert [turn.get("tool_call_id") for turn in turns] == [None, None, "d2", "r2", None]
    assert [turn.get("name") for turn in turns] == [None, None, "g", "f", None]


def test_unused_keys_are_left_out(make, target):
    _, rows, _ = make([answered(target, 1)])("specforge")
    assert rows[0]["conversations"][1].keys() == {"role", "content"}
    assert rows[0].keys() == {"id", "conversations"}


def test_messages_keep_tool_calls_as_lists(make, target):
    _, rows, _ = make([answered(target, 1), with_tools(target, 2)])("messages")
    with_call = next(row for row in rows if len(row["messages"]) == 4)
    assert with_call["messages"][1]["tool_calls"][0]["function"]["name"] == "weather"
    assert all(isinstance(turn["tool_calls"], list) for row in rows for turn in row["messages"] if "tool_calls" in turn)
    assert with_call["conversation_id"] == f"{2:032x}/1"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("angelslim", "tool calls"),
        ("torchspec", "tool calls"),
        ("eagle", "tool calls"),
    ],
)
def test_formats_without_tools_leave_those_samples_out(make, target, name, reason):
    report, rows, _ = make([answered(target, 1), with_tools(target, 2)])(name)
    assert report["left_out"] == {reason: 1}
    assert len(rows) == 1


def test_lost_reasoning_is_counted(make, target):
    thoughtful = answered(target, 1)
    thoughtful.messages[1].reasoning = "hmm"
    exported = make([thoughtful, answered(target, 2)])
    for name in ("eagle", "angelslim"):
        report, rows, _ = exported(name)
        assert report["lost"]["reasoning"] == 1
        assert "hmm" not in json.dumps(rows)
    for name, key in (("specforge", "reasoning_content"), ("deepspec", "thinking"), ("torchspec", "thinking")):
        report, rows, _ = exported(name)
        assert "reasoning" not in report["lost"]
        assert rows[0]["conversations"][1][key] == "hmm"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"messages": []}, "ready tokens without messages"),
        ({"flags": ["truncated"]}, "truncated answer: rendered, it would end with a stop token"),
        ({"flags": ["reasoning_only"]}, "unfinished thought: rendered, it would be closed"),
        ({"messages": [records.Message("user", "only a question")]}, "the last turn is not the assistant's"),
        (
            {"messages": [records.Message("assistant", "hello"), records.Message("assistant", "there")]},
            "the first turn is not the user's",
        ),
    ],
)
def test_what_text_cannot_hold_is_left_out_with_its_reason(make, target, change, reason):
    exported = make([answered(target, 1), answered(target, 2, **change)])
    report, rows, _ = exported("specforge")
    assert report["left_out"] == {reason: 1}
    assert len(rows) == 1
    assert len(exported("tokens")[1]) == 2


def test_eagle_leaves_the_unrenderable_out_too(make, target):
    report, rows, _ = make([answered(target, 1), answered(target, 2, flags=["truncated"])])("eagle")
    assert report["left_out"] == {"truncated answer: rendered, it would end with a stop token": 1}
    assert len(rows) == 1


def test_eagle_rows(make, target):
    system = answered(target, 2)
    system.messages.insert(0, records.Message("system", "Be brief."))
    report, rows, _ = make([answered(target, 1, turns=2), system])("eagle")
    assert [turn["from"] for turn in rows[0]["conversations"]] == ["human", "gpt", "human", "gpt"]
    assert report["left_out"] == {"system turn": 1}


def test_datasets_folder_holds_the_parts_and_a_card(make, target, tmp_path):
    report, _, folder = make([answered(target, number) for number in range(5)])("datasets")
    assert report["files"] == ["data/train-00000-of-00001.parquet"]
    assert pq.read_table(folder / report["files"][0]).equals(pq.read_table(tmp_path / "training/part-00000.parquet"))
    front, body = (folder / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    assert yaml.safe_load(front)["configs"][0]["data_files"][0]["path"] == "data/train-*.parquet"
    assert yaml.safe_load(front)["size_categories"] == ["n<1K"]
    assert "| alpha | 5 |" in body
    assert read_manifest(folder).version == read_manifest(tmp_path / "training").version


def test_another_tokenizer_is_refused(tmp_path, target):
    corpus(tmp_path, paths=[shard(tmp_path / "alpha/000.parquet", [sample(1)])])
    with pytest.raises(UserError, match="was made with another tokenizer than embedded:smollm2"):
        export("tokens", tmp_path / "training", target, tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_the_one_before(make, target, monkeypatch):
    exported = make([answered(target, 1)])
    _, rows, folder = exported("tokens")

    def broken(*arguments):
        raise OSError("broken")

    monkeypatch.setitem(FORMATS, "tokens", broken)
    with pytest.raises(OSError, match="broken"):
        exported("tokens")
    assert lines_of(folder / "data/00000.jsonl") == rows
    assert [path.name for path in folder.parent.glob(".*.partial")] == []


def test_tool_calls_in_any_shape_become_openai_ones():
    (call,) = openai_calls(CALL)
    assert call == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Brno","days":2}'},
    }
    assert openai_calls(json.dumps([call])) == [call]
    assert openai_calls('[{"name": "f"}]')[0]["function"] == {"name": "f", "arguments": "{}"}
    assert openai_calls(None) == []


def test_command_line(make, target, target_folder, tmp_path, capsys):
    make([answered(target, 1)])
    where = ["--training", str(tmp_path / "training"), "--target", str(target_folder)]
    assert export_training.main(["--format", "tokens", *where, "--output", str(tmp_path / "exports/tokens")]) == 0
    assert "1 samples, 1 rows in 1 files" in capsys.readouterr().err
    missing = ["--training", str(tmp_path / "nothing"), "--target", str(target_folder)]
    assert export_training.main(["--format", "tokens", *missing, "--output", str(tmp_path / "x")]) == 1
    assert "there is no corpus" in capsys.readouterr().err


def test_every_format_meets_its_trainers_own_loader():
    """Those tests are slow, so that nobody notices the one that is missing."""
    tests = (Path(__file__).parents[2] / "trainers/test_exports.py").read_text()
    named = {node.value for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Constant)}
    missing = sorted(FORMATS.keys() - named)
    assert not missing, f"exports without a test in tests/trainers/test_exports.py: {', '.join(missing)}"


def test_the_docs_name_every_format_once():
    """docs/exports.md has a table of the formats; a format without a row there is found by nobody."""
    text = (Path(__file__).parents[3] / "docs/exports.md").read_text()
    table = text.partition("## Formats")[2].partition("\n\n| format |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))
    assert named == sorted(FORMATS), "docs/exports.md#formats differs from FORMATS"
