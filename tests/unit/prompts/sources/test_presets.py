"""Presets, the reference plan, and which files of a source a dataset is made of."""

import re

import pytest

from scripts.lib.config.file import load_config
from scripts.lib.config.model import Dataset
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import PROJECT
from scripts.lib.prompts.cleaning import check_turns
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources import conversation_of, local_files
from scripts.lib.prompts.sources.presets import PRESETS, plan_of
from scripts.lib.prompts.sources.rows import Row


def dataset(**keys):
    return Dataset(**({"class": "B"} | keys))


def conversation(preset, row, **keys):
    return conversation_of(Row("f:1", row), plan_of("d", dataset(preset=preset, **keys)))


def texts(preset, row, **keys):
    return [(m.role, m.content) for m in conversation(preset, row, **keys).messages]


Q, A = ("user", "q"), ("assistant", "a")
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
# One row of each, with the columns that the dataset cards name.
ROWS = {
    "open-perfectblend": {"conversations": SHAREGPT, "source": "x"},
    "magicoder-oss": {"lang": "c", "raw_index": 1, "index": 2, "seed": "int x;", "problem": "q", "solution": "a"},
    "magicoder-evol": {"instruction": "q", "response": "a"},
    "mixture-of-thoughts": {"messages": MESSAGES, "num_tokens": 9, "source": "x"},
    "openthoughts-114k": {"system": "Use <|begin_of_thought|>.", "conversations": SHAREGPT},
    "openthoughts2": {"conversations": SHAREGPT, "question": "q", "source": "x", "id": 7},
    "openthoughts3": {"difficulty": None, "source": "x", "domain": "math", "conversations": SHAREGPT},
    "ultrachat-200k": {"prompt": "q", "prompt_id": "7", "messages": MESSAGES},
    "sharegpt": {"id": "x_0", "conversations": SHAREGPT},
    "sharegpt-vicuna-split": {"id": "x_0", "conversations": SHAREGPT},
    "tulu-3": {"id": "x", "messages": MESSAGES, "source": "x"},
    "wildchat": {
        "conversation_hash": "7", "model": "m", "turn": 1, "toxic": False, "redacted": False, "hashed_ip": "1",
        "conversation": [{**turn, "country": "c", "hashed_ip": "1", "header": {"user-agent": "x"}, "turn_identifier": 1}
                         for turn in MESSAGES],
    },
    "lmsys-chat-1m": {"conversation_id": "7", "model": "m", "conversation": MESSAGES, "turn": 1, "redacted": False},
    "nemotron-v1": {
        "input": MESSAGES[:1], "output": "a", "category": "math", "reasoning": "on",
        "system_prompt": "detailed thinking on",
    },
    "nemotron-v2": {"uuid": "7", "category": "math", "reasoning": "off", "messages": MESSAGES},
    "opc-sft-stage1": {"instruction": "q", "output": "a"},
    "magpie-qwen2.5": {"uuid": "7", "instruction": "q", "response": "a", "conversations": SHAREGPT},
    "magpie-llama-3.1": {"uuid": "7", "instruction": "q", "response": "a", "conversations": SHAREGPT},
    "infinity-instruct": {"id": 7, "conversation": MESSAGES[:1], "generated_message": {"content": "a"}},
    "gsm8k": {"question": "q", "answer": "a"},
    "hermes-function-calling": {"conversations": SHAREGPT, "tools": '[{"name": "f"}]'},
}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"pretokenized"}))
def test_preset_reads_its_datasets_rows(preset):
    assert texts(preset, ROWS[preset]) == [Q, A]
    assert all(message.reasoning is None for message in conversation(preset, ROWS[preset]).messages)


def test_pretokenized():
    row = {"input_ids": [1, 2], "labels": [-100, 2]}
    assert conversation("pretokenized", row, source="x/*.parquet").loss_mask == [0, 1]


def test_wildchat_leaves_out_what_is_marked():
    with pytest.raises(Defect, match="filtered.*toxic is True"):
        conversation("wildchat", ROWS["wildchat"] | {"toxic": True})


def test_config_wins_over_the_preset():
    plan = plan_of("d", dataset(preset="ultrachat-200k", split="test_sft", revision="abc", fields={"messages": "m"}))
    assert (plan.split, plan.revision, plan.fields.messages) == ("test_sft", "abc", "m")


def test_split_of_a_preset_is_not_looked_for_in_ones_own_files():
    plan = plan_of("d", dataset(preset="mixture-of-thoughts", source="mine.jsonl"))
    assert (plan.sources, plan.hub_config, plan.split, plan.format) == (("mine.jsonl",), None, None, "messages")


def test_unknown_preset_and_preset_without_a_source():
    with pytest.raises(UserError, match=r"datasets\.d\.preset: no preset `ultrachat`; did you mean `ultrachat-200k`\?"):
        plan_of("d", dataset(preset="ultrachat"))
    with pytest.raises(UserError, match=r"datasets\.d\.source: the preset `pretokenized` needs a `source`"):
        plan_of("d", dataset(preset="pretokenized"))


@pytest.mark.parametrize("key", ["hub_config", "split", "revision"])
def test_what_only_the_hub_has_is_not_ignored_elsewhere(key):
    with pytest.raises(UserError, match=rf"datasets\.d\.{key}: only `hf:` sources have one"):
        plan_of("d", dataset(source="a.jsonl", **{key: "x"}))
    assert plan_of("d", dataset(source=["a.jsonl", "hf:owner/name"], **{key: "x"}))


def test_reference_plan():
    config = load_config(PROJECT / "config" / "reference.yaml")
    assert list(config.datasets) == [*(f"B{n}" for n in range(1, 9)), "A1", "A2"]
    for name, one in config.datasets.items():
        assert one.data_class == name[0]
        assert (one.max_samples, one.token_budget) == (7000, 10_000_000)
        assert local_files(name, one) == []  # nothing here has to exist before the plan
    assert {one.lane for one in config.datasets.values()} == {"short", "long"}


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "notes.md", "sub/c.csv", ".hidden/d.jsonl", "_tmp.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def found(folder, source):
    return [re.sub(f"^{folder}/", "", path) for path in local_files("d", dataset(source=source))]


def test_files_globs_and_folders(folder):
    assert found(folder, f"{folder}/b.jsonl") == ["b.jsonl"]
    assert found(folder, f"{folder}/[ab].jsonl*") == ["a.jsonl.gz", "b.jsonl"]
    assert found(folder, str(folder)) == ["a.jsonl.gz", "b.jsonl", "sub/c.csv"]
    assert found(folder, [f"{folder}/sub/*", "hf:owner/name", "https://host/x.csv", f"{folder}/b.jsonl"]) == [
        "sub/c.csv",
        "b.jsonl",
    ]


def test_name_with_brackets_is_a_file_first(folder):
    (folder / "x[1].jsonl").write_text("x")
    assert found(folder, f"{folder}/x[1].jsonl") == ["x[1].jsonl"]


@pytest.mark.parametrize(
    ("source", "problem"), [("no.jsonl", "no such file"), ("no*.csv", "no file matches"), ("empty", "no data files")]
)
def test_what_is_missing_is_named(folder, source, problem):
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=rf"datasets\.d\.source: .*{re.escape(source)}: .*{problem}"):
        local_files("d", dataset(source=f"{folder}/{source}"))


def test_hermes_conversations_with_tools_can_be_used():
    row = {
        "id": "1",
        "conversations": [
            {"from": "system", "value": "You call functions. <tools>\n[{'type': 'function'}]\n</tools>"},
            {"from": "human", "value": "Find a boat."},
            {"from": "gpt", "value": "<tool_call>\n{'arguments': {'lake': 'Constance', 'open': True}, 'name': 'boats'}\n</tool_call>\n"},
            {"from": "tool", "value": '<tool_response>\n{"name": "boats", "content": []}\n</tool_response>\n'},
            {"from": "gpt", "value": "There is none."},
        ],
        "tools": '[{"type": "function", "function": {"name": "boats", "parameters": {}}}]',
        "category": "x",
    }  # fmt: skip
    messages = conversation("hermes-function-calling", row).messages
    check_turns(messages)
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2].tool_calls is not None
