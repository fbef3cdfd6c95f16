"""What one job of stage 2 is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from scripts.lib.config.model import Config


@dataclass(frozen=True)
class ShardJob:
    """One shard of a dataset to be answered."""

    config: Config
    dataset: str
    shard: str
    target: Path
    prompts: Path
    output: Path
    state: Path

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.shard}"
