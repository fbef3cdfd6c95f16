"""One row of a source, before anybody knows what it means."""

from dataclasses import dataclass
from typing import Any

from scripts.lib.prompts.defects import Defect

# Far beyond any prompt; what keeps a file without line breaks from filling the memory.
MAX_ROW_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
BATCH_ROWS = 128


@dataclass(slots=True)
class Row:
    """One row of a source. `value` is what JSON would hold of it; None when `defect` says why it can't be read."""

    where: str  # "file:row"; row is the line of text files, the number from 1 of others
    value: Any
    defect: Defect | None = None
