"""The kinds of engines: one class each, which holds all that is known of it, and their registry."""

from scripts.lib.config.model import Config
from scripts.lib.engines.base import Adapter
from scripts.lib.engines.llamacpp import LlamaCpp
from scripts.lib.engines.openai import OpenAI
from scripts.lib.engines.sglang import SGLang
from scripts.lib.engines.vllm import VLLM

ENGINES: dict[str, type[Adapter]] = {engine.kind: engine for engine in (LlamaCpp, SGLang, VLLM, OpenAI)}


def adapter_for(config: Config) -> Adapter:
    """The engine of `engine.kind`. Raises UserError when the configuration asks for what it can't do."""
    adapter = ENGINES[config.engine.kind](config)
    adapter.check()
    return adapter
