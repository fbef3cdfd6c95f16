"""`python -m tests.cases`: its own small folder passes, and it says what differs where something does."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.lib.core.records import Message
from scripts.lib.target.model import load_target
from tests.cases.__main__ import main
from tests.generation import target_folder

OWN = Path(__file__).parents[1] / "cases" / "own"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(OWN, tmp_path / "cases")
    return tmp_path / "cases"


def rewrite(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_own_cases_hold(capsys):
    assert main([str(OWN)]) == 0
    assert capsys.readouterr().out.endswith("3 of 3 pass\n")


@pytest.mark.parametrize(
    ("case", "old", "new", "told"),
    [
        ("sky", "assistant: Blue", "assistant: Green", "no prompt with"),
        ("sky", "⟦Blue", "⟦Green", "right is ['Green.<|im_end|>']"),
        ("sky", '"rows": 1', '"rows": 2', "rows: rows.jsonl (A): 1 , right is 2"),
        ("sky", '"kept": 1', '"kept": [2]', "right is [2]"),
        ("sky", '["assistant", "Blue."]', '["assistant", "Green."]', "messages: rows.jsonl (A): [["),
        ("sky", '"not_supervised": ["colour"]', '"not_supervised": ["Blue"]', "supervised: Blue"),
        ("sky", '{"answers_cut": 1}', '{"answers_cut": 2}', "changes: rows.jsonl (B): {'answers_cut': 1}, right is"),
        ("sky", '"reasons": {}', '"odd": 3', "nothing here that can be checked: 3"),
        ("context", "instruction, blank line, context", "all is well", "nothing here that can be checked"),
        ("context", "instruction, blank line, context", "context, blank line, instruction", "asked ['When does"),
        ("context", "instruction, blank line, context", "a refusal, or two user turns", "1 kept"),
    ],
)  # fmt: skip
def test_what_differs_is_told(folder, capsys, case, old, new, told):
    rewrite(folder / "found" / case / "expected.json", old, new)
    assert main([str(folder), case]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"FAIL  {case}\n")
    assert told in out


def test_one_of_two_alternatives_is_enough(folder):
    rewrite(folder / "found" / "context" / "expected.json", "instruction, blank", "a refusal, or instruction, blank")
    assert main([str(folder), "context"]) == 0


def test_golden_samples_are_held_against_prompts_ids_and_masks(tmp_path, capsys):
    target = load_target(target_folder())
    asked = {"role": "user", "content": "What is 2+2?"}
    prompt, output = (
        target.render([Message("user", asked["content"])]),
        [*target.encode("4."), *sorted(target.eos_ids)[-1:]],
    )
    sample = {"prompt_ids": prompt, "output_ids": output, "input_ids": prompt + output, "messages": [asked]}
    sample["loss_mask"] = [0] * len(prompt) + [1] * len(output)
    entry = {
        "id": "sum",
        "tokenizer": "",
        "kwargs": {},
        "finish_reason": "stop",
        "mergeable": False,
        "samples": [sample],
    }

    def judged(**changed):
        (tmp_path / "golden_ids.json").write_text(json.dumps([entry | {"samples": [sample | changed]}]))
        return main([str(tmp_path)]), capsys.readouterr().out

    assert judged() == (0, "pass  sum\n1 of 1 pass\n")
    code, out = judged(loss_mask=[1] * len(prompt + output))
    assert (code, f"mask: at 0 of {len(prompt + output)}" in out) == (1, True)
    code, out = judged(prompt_ids=prompt[1:])
    assert (code, f"prompt 0: at 0 of {len(prompt) - 1}" in out) == (1, True)


def test_a_folder_without_cases_proves_nothing(tmp_path):
    assert main([str(tmp_path)]) == 1
