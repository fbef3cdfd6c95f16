"""One real engine for all workflow tests of a worker, and the config that they share."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

ENGINE = """
import threading, xllamacpp as xlc
from scripts.lib.target.location import embedded_model
parameters = xlc.CommonParams()
parameters.model.path = str(embedded_model())
parameters.n_parallel, parameters.n_ctx, parameters.port = 8, 8 * 1024, 0
parameters.cont_batching = parameters.use_jinja = parameters.endpoint_metrics = True
server = xlc.Server(parameters)
print(server.listening_address, flush=True)
threading.Event().wait()  # until the test kills it
"""

CONFIG = {
    "model": {"name": "embedded:smollm2", "context_length": 1024},
    "engine": {"kind": "llamacpp", "launch": {"slots": 8, "linger": 2}},
    "sampling": {"temperature": 0.7, "seed": 0},
    "lanes": {"short": {"max_tokens": 24, "concurrency": 8}},
    "shards": 2,
    "datasets": {
        "code": {"class": "B", "source": "config/prompts/code.jsonl", "max_samples": 8},
        "chat": {"class": "B", "source": "config/prompts/chat.json", "max_samples": 8},
        "conversations": {"class": "A", "source": "config/prompts/conversations.jsonl", "max_samples": 6},
    },
}


@pytest.fixture
def config() -> dict:
    """A small config: about 16 prompts of 24 tokens, and 6 ready conversations."""
    return copy.deepcopy(CONFIG)


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """Base URL of a real llama.cpp server with the real model, apart from the project's own fleet."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        # Waiting threads sleep: other tests keep the cores busy.
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), "the engine did not start"
    yield url
    process.kill()
    process.wait()
