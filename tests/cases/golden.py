"""Golden samples: messages, ids that were sampled, and the ids and masks that must come of them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from scripts.lib.config.file import load_config
from scripts.lib.core.records import Completion, Message, Prompt, Sample, Turn, read_rows, write_rows
from scripts.lib.target.model import Target, load_target
from scripts.lib.target.output import split_output
from scripts.lib.tokens.completions import tokenize_completions
from tests.cases.stages import DATASET, Bench


def check(bench: Bench, entry: dict[str, Any]) -> str:
    """What differs for one golden entry; "" when nothing does."""
    folder = bench.target(entry["tokenizer"], entry["kwargs"])
    target = load_target(folder)
    return _prompts(target, entry) or _samples(bench, target, entry)


def _prompts(target: Target, entry: dict[str, Any]) -> str:
    """The prompts of all turns, as the target's template renders them."""
    for number, sample in enumerate(entry["samples"]):
        found = target.render(_messages(sample["messages"]))
        if found != sample["prompt_ids"]:
            return f"prompt {number}: {difference(sample['prompt_ids'], found)}"
    return ""


def _samples(bench: Bench, target: Target, entry: dict[str, Any]) -> str:
    """The samples that the stage `tokens` makes of these turns."""
    folder = bench.folder()
    identity = hashlib.sha256(entry["id"].encode()).hexdigest()[:32]
    last = _messages(entry["samples"][-1]["messages"])
    turns = []
    for sample in entry["samples"]:
        split = split_output(target, sample["prompt_ids"], sample["output_ids"])
        turns.append(
            Turn(sample["prompt_ids"], sample["output_ids"], entry["finish_reason"], split.content, split.reasoning)
        )
    asked = [message for message in last if message.role != "assistant"]
    answer = Message("assistant", turns[-1].content or "", turns[-1].reasoning)
    outcome = "ok" if entry["finish_reason"] == "stop" else "length"
    paths = [folder / name for name in ("prompts.parquet", "completions.parquet", "tokens.parquet")]
    write_rows(paths[0], Prompt, [Prompt(identity, DATASET, "golden:1", identity, asked)], {})
    write_rows(
        paths[1], Completion, [Completion(identity, DATASET, outcome, messages=[*last, answer], turns=turns)], {}
    )
    config = bench.config(folder, entry["tokenizer"], entry["kwargs"], {"class": "B", "source": "golden"})
    tokenize_completions(load_config(config), DATASET, target, *paths)
    found = [(sample.input_ids, sample.loss_mask) for sample in read_rows(paths[2], Sample)]
    right = [entry["merged"]] if entry["mergeable"] else entry["samples"]
    expected = [(sample["input_ids"], sample["loss_mask"]) for sample in right]
    if len(found) != len(expected):
        return f"{len(found)} samples, right are {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(found, expected)):
        for what, left, right_one in zip(("ids", "mask"), theirs, mine):
            if left != right_one:
                return f"sample {number}, {what}: {difference(left, right_one)}"
    return ""


def _messages(values: list[dict[str, Any]]) -> list[Message]:
    return [Message(value["role"], value["content"], value.get("reasoning_content")) for value in values]


def difference(right: list[int], found: list[int]) -> str:
    """Where two lists part, with what stands there."""
    at = next(
        (place for place, pair in enumerate(zip(right, found)) if pair[0] != pair[1]), min(len(right), len(found))
    )
    return f"at {at} of {len(right)}: right {right[at : at + 6]}, found {found[at : at + 6]}"


def entries(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_bytes()) if path.is_file() else []
