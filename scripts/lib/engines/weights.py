"""A hub model's weights, fetched once before its servers start.

Servers that fetch them themselves do so all at once, and in the time that a start may take.
"""

from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core.command import say
from scripts.lib.core.locks import hold
from scripts.lib.engines.launching import flag_name
from scripts.lib.target.location import ModelLocation, download

# What engines read: not a second copy in another format, nor a research code's own checkpoint in a folder beside.
_SMALL = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
_WEIGHTS, _OLDER_WEIGHTS = "*.safetensors", "*.bin"
# Flags with which an engine looks elsewhere, or needs none.
_ELSEWHERE = {"model", "model-path", "load-format", "download-dir"}


def fetch_weights(config: Config, lock: Path) -> None:
    """Bring the model that servers are to load into the hub's cache, one process at a time. Raises UserError."""
    model = ModelLocation(config.model.name)
    if model.is_local or model.hub_id is None or _ELSEWHERE & {flag_name(flag) for flag in config.engine.launch.flags}:
        return
    with hold(lock):
        say(f"fetching {model.hub_id}, or making sure that it is there whole")
        folder, _ = download(model.hub_id, config.model.revision, (*_SMALL, _WEIGHTS))
        if not any(folder.rglob(_WEIGHTS)):
            download(model.hub_id, config.model.revision, (*_SMALL, _OLDER_WEIGHTS))
