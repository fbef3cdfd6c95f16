"""Engine adapters: pure functions between our prompts and each server's wire shapes."""

from scripts.lib.config.model import Config
from scripts.lib.engines.base import Adapter
from scripts.lib.engines.llamacpp import LlamaCpp
from scripts.lib.engines.openai import OpenAI
from scripts.lib.engines.sglang import SGLang
from scripts.lib.engines.vllm import VLLM


def adapter_for(config: Config) -> Adapter:
    """The adapter of `engine.kind`."""
    engine = config.engine
    served_model = engine.served_model or config.model.name
    adapters = {
        "llamacpp": lambda: LlamaCpp(),
        "sglang": lambda: SGLang(engine, served_model),
        "vllm": lambda: VLLM(served_model),
        "openai": lambda: OpenAI(engine, served_model),
    }
    return adapters[engine.kind]()
