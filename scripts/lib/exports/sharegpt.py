"""EAGLE's ShareGPT JSON Lines (eagle/traineagle3/main.py): `from`/`value`, human first, strictly alternating.

The format has no system turn, no tools and no reasoning, and its trainer knows the Llama 3 template
only and drops rows above 2,048 tokens. Samples that don't fit are left out and counted.
"""

from pathlib import Path

from scripts.lib.core.records import Sample
from scripts.lib.exports.json_lines import JsonLines
from scripts.lib.exports.report import Report, unrenderable
from scripts.lib.target.model import Target
from scripts.lib.training.reader import Corpus

ROLES = ("human", "gpt")
MAX_TOKENS = 2048


def export(corpus: Corpus, target: Target, folder: Path, report: Report) -> None:
    """Write the conversations that EAGLE's trainer can hold."""
    with JsonLines(folder, report) as lines:
        for sample in corpus.samples():
            report.read += 1
            reason = _unfit(sample)
            if reason:
                report.left_out[reason] += 1
                continue
            if any(message.reasoning for message in sample.messages):
                report.lost["reasoning"] += 1
            if not all(message.trainable for message in sample.messages):
                report.lost["mask of answers that are not to be learnt: the trainer learns them"] += 1
            if len(sample.input_ids) > MAX_TOKENS:
                report.lost[f"all of it: the trainer drops rows above {MAX_TOKENS} tokens"] += 1
            turns = [
                {"from": ROLES[number % 2], "value": message.content} for number, message in enumerate(sample.messages)
            ]
            lines.write({"id": sample.id, "conversations": turns})
    report.lost["exact ids and loss mask: the trainer tokenizes the text again"] = report.rows
    report.notes.append("EAGLE's trainer renders with the Llama 3 template, whatever the target's is")


def _unfit(sample: Sample) -> str | None:
    reason = unrenderable(sample)
    if reason:
        return reason
    roles = [message.role for message in sample.messages]
    if "system" in roles:
        return "system turn"
    if "tool" in roles or any(message.tool_calls for message in sample.messages):
        return "tool calls"
    if len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2):
        return "turns don't alternate between user and assistant"
    return None
