"""Engine adapters: pure functions between our prompts and each server's wire shapes."""

from scripts.lib.config import Engine
from scripts.lib.engines.base import Adapter
from scripts.lib.engines.llamacpp import LlamaCpp


def adapter_for(engine: Engine) -> Adapter:
    """The adapter of `engine.kind`."""
    if engine.kind == "llamacpp":
        return LlamaCpp()
    raise ValueError(f"no engine {engine.kind!r}")
