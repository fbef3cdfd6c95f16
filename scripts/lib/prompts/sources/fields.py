"""A row's columns by what they mean, and which of them nobody reads.

What the columns are called in public datasets: the dataset cards named in `presets`, and the dataset docs of
LLaMA-Factory, axolotl, ms-swift and SpecForge.
"""

from typing import Any

from scripts.lib.config.model import Fields
from scripts.lib.prompts.sources.contents import first_of, text_of

COLUMNS = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat"),
    "prompt": ("prompt", "instruction", "question", "problem", "query", "input", "message_1", "text"),
    "input": ("input", "options"),
    # What a question is about: Dolly and SQuAD, SQL schemas, BoolQ, RACE.
    "context": ("context", "contexts", "passage", "article"),
    "choices": ("choices", "options"),
    "response": (
        "response", "output", "answer", "solution", "completion", "canonical_solution", "rationale", "message_2",
        "generated_message",
    ),
    "reasoning": ("reasoning_content", "thinking", "thought"),
    "system": ("system", "system_prompt", "system_message", "custom_instructions"),
    "tools": ("tools", "functions"),
    "id": (
        "id", "uuid", "prompt_id", "conversation_id", "conversation_hash", "question_id", "task_id", "problem_id",
        "message_tree_id", "_id",
    ),
    "input_ids": ("input_ids",),
    "labels": ("labels",),
    "loss_mask": ("loss_mask",),
}  # fmt: skip


class Columns:
    """A row's columns by what they mean: the configured name, or the usual ones. Upper case is tolerated.

    `get`, `text` and `plain` read, `peek` and `has` only look: what was not read is what `unused` tells.
    """

    def __init__(self, row: dict, fields: Fields):
        self.row = row
        self.fields = fields
        self._lower = {name.lower(): value for name, value in row.items() if isinstance(name, str)}
        self._read: set[str] = set()

    def get(self, meaning: str, names: tuple[str, ...] | None = None) -> Any:
        """The value of the column for `meaning`; None when it is absent or null."""
        override = getattr(self.fields, meaning, None)
        if override is not None:
            self._read.add((override if override in self.row else override.split(".")[0]).lower())
            return self._nested(override)
        for name in names or COLUMNS[meaning]:
            if self._lower.get(name) is not None:
                self._read.add(name)
                return self._lower[name]
        return None

    def peek(self, meaning: str) -> Any:
        """Like `get`, for whoever only wants to know what kind of row this is."""
        override = getattr(self.fields, meaning, None)
        return self._nested(override) if override is not None else first_of(self._lower, COLUMNS[meaning])

    def text(self, meaning: str, names: tuple[str, ...] | None = None) -> str:
        """The text of a column; "" when there is none. Raises Defect when it holds something else."""
        return text_of(self.get(meaning, names))[0]

    def named(self, meaning: str) -> bool:
        """Whether the config names the column for `meaning`."""
        return getattr(self.fields, meaning, None) is not None

    def has(self, *names: str) -> bool:
        return any(self._lower.get(name) is not None for name in names)

    def look(self, name: str) -> Any:
        """The column of this name, without reading it."""
        return self._lower.get(name)

    def plain(self, name: str) -> Any:
        self._read.add(name)
        return self._lower.get(name)

    def unused(self, texts: set[str]) -> dict[str, int]:
        """Columns with text that nobody read, with its length in characters.

        Without ids, and without columns that only repeat one of `texts`, those of the conversation.
        """
        found = {}
        for name, value in self._lower.items():
            if value is None or name in self._read or name in COLUMNS["id"]:
                continue
            if not (isinstance(value, str) and value in texts) and (characters := _characters(value)):
                found[name] = characters
        return found

    def _nested(self, path: str) -> Any:
        if path in self.row:
            return self.row[path]
        value: Any = self.row
        for step in path.split("."):
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return None
        return value


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value.strip())
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_characters, value)) if not isinstance(value, int | float | bytes) and _iterable(value) else 0


def _iterable(value: Any) -> bool:
    return hasattr(value, "__iter__")
