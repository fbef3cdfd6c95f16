"""What a shard of samples was made from."""

from pathlib import Path
from typing import Any

from scripts.lib.config.model import Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import records
from scripts.lib.core.provenance import code_version
from scripts.lib.target.model import Target


def provenance_of(config: Config, dataset: str, target: Target, *inputs: Path) -> dict[str, Any]:
    """For the metadata of the shard; the provenance of every input is carried along."""
    return {
        "stage": "tokens",
        "settings": stage_settings(config, "tokens", dataset),
        "target": target.provenance(),
        "code": code_version(),
        "inputs": [records.read_provenance(path) for path in inputs],
    }
