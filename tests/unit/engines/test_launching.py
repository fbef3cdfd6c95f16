"""Command lines of the servers, against programs that record how they were called."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from scripts.lib.config.model import Sampling
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.engines import adapter_for, embedded_server
from scripts.lib.engines.launching import with_flags
from scripts.lib.engines.llamacpp import affordable_slots, cache_bytes_per_token
from scripts.lib.engines.sglang import mamba_flag
from scripts.lib.fleet.launch import plan
from scripts.lib.target.gguf import read_header
from scripts.lib.target.location import embedded_model
from tests.help_options import RECORDED, recorded
from tests.launches import configured, target_of_4096


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_of_4096(tmp_path)


HELP_NEW = (RECORDED / "sglang.txt").read_text()
# The one line that matters, in the wording of an SGLang before the rename.
HELP_OLD = """\
  --mamba-scheduler-strategy {auto,no_buffer,extra_buffer}
                        The strategy to use for mamba scheduler.
"""
RECORDER = """\
#!{python}
import sys
if "--help" in sys.argv:
    print({help!r})
    sys.exit({code})
"""


def environment(folder: Path, *programs: str, help_text: str = "", code: int = 0) -> str:
    for program in programs:
        path = folder / "venv" / "bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORDER.format(python=sys.executable, help=help_text, code=code))
        path.chmod(0o755)
    return str(folder / "venv")


def flags(command: list[str]) -> dict[str, str | bool]:
    """`--name value` pairs of a command line."""
    found: dict[str, str | bool] = {}
    for index, argument in enumerate(command):
        if argument.startswith("--"):
            following = command[index + 1 : index + 2]
            found[argument[2:]] = following[0] if following and not following[0].startswith("--") else True
    return found


def test_embedded_command(target: Path) -> None:
    [one] = plan(configured(slots=16, threads=3), target)
    assert one.command[:2] == [sys.executable, "-P"]
    assert flags(one.command) == {
        "model": str(embedded_model()), "port": "{port}", "slots": "16", "context": "65536", "threads": "3",
    }  # fmt: skip
    assert one.env == {"OMP_WAIT_POLICY": "passive"}


def test_embedded_server_refuses_flags_it_would_ignore(target: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.launch\.flags: the embedded server has none"):
        plan(configured(flags={"flash-attn": True}), target)


def test_llama_server_of_an_environment(target: Path, tmp_path: Path) -> None:
    venv = environment(tmp_path, "llama-server")
    [one] = plan(
        configured(environment=venv, slots=4, flags={"flash_attn": True, "parallel": 2, "jinja": None}), target
    )
    assert one.command[0] == f"{venv}/bin/llama-server"
    found = flags(one.command)
    assert found["flash-attn"] is True
    assert found["parallel"] == "2"
    assert "jinja" not in found
    assert (found["host"], found["ctx-size"], found["metrics"]) == ("127.0.0.1", "16384", True)
    assert one.env["VIRTUAL_ENV"] == venv
    assert one.env["PATH"].startswith(f"{venv}/bin:")


def test_sglang_command(target: Path, tmp_path: Path) -> None:
    venv = environment(tmp_path, "python", help_text=HELP_NEW)
    config = configured(
        "sglang",
        model={"name": "owner/model", "revision": "abc123", "trust_remote_code": True},
        environment=venv,
        replicas=2,
        gpus_per_replica=2,
        tensor_parallel=2,
        attention_backend="flashinfer",
        mem_fraction_static=0.85,
        max_running_requests=200,
        mamba_strategy="extra_buffer",
        flags={"chunked-prefill-size": 4096, "disable-radix-cache": True, "context-length": 2048},
        env={"NCCL_P2P_DISABLE": "1"},
    )
    first, second = plan(config, target)
    assert first.command == second.command
    assert first.command[:3] == [f"{venv}/bin/python", "-m", "sglang.launch_server"]
    assert flags(first.command) == {
        "model-path": "owner/model", "revision": "abc123", "trust-remote-code": True, "served-model-name": "owner/model",
        "host": "127.0.0.1", "port": "{port}", "nccl-port": "{other_port}", "tp-size": "2", "dp-size": "1", "context-length": "2048",
        "attention-backend": "flashinfer", "mem-fraction-static": "0.85", "max-running-requests": "200",
        "enable-metrics": True, "mamba-radix-cache-strategy": "extra_buffer",
        "watchdog-timeout": "1800", "chunked-prefill-size": "4096", "disable-radix-cache": True,
    }  # fmt: skip
    assert (first.env["CUDA_VISIBLE_DEVICES"], second.env["CUDA_VISIBLE_DEVICES"]) == ("0,1", "2,3")
    assert first.env["NCCL_P2P_DISABLE"] == "1"


def test_sglang_finds_the_toolkit_of_its_own_wheels(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    venv = environment(tmp_path, "python")
    toolkit = Path(venv) / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").touch()
    [one] = plan(configured("sglang", model={"name": "owner/model"}, environment=venv), target)
    assert one.env["CUDA_HOME"] == str(toolkit)
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert "CUDA_HOME" not in plan(configured("sglang", model={"name": "owner/model"}, environment=venv), target)[0].env


def test_sglang_that_cannot_start_shows_its_own_words(target: Path, tmp_path: Path) -> None:
    venv = environment(tmp_path, "python", code=1)
    with pytest.raises(UserError, match=r"--help` failed \(run `make doctor`\)"):
        plan(configured("sglang", model={"name": "owner/model"}, environment=venv, mamba_strategy="auto"), target)


def test_mamba_strategy_in_the_words_of_the_installed_version() -> None:
    assert mamba_flag(HELP_NEW, "no_buffer") == ("mamba-radix-cache-strategy", "no_buffer")
    assert mamba_flag(HELP_OLD, "extra_buffer") == ("mamba-scheduler-strategy", "extra_buffer")
    with pytest.raises(UserError, match="knows auto, not `no_buffer`"):
        mamba_flag("--mamba-scheduler-strategy {auto}", "no_buffer")
    with pytest.raises(UserError, match="has none of --mamba-radix-cache-strategy, --mamba-scheduler-strategy"):
        mamba_flag("--port PORT", "no_buffer")


def test_vllm_command(target: Path, tmp_path: Path) -> None:
    venv = environment(tmp_path, "vllm")
    model = tmp_path / "weights"
    model.mkdir()
    config = configured(
        "vllm", model={"name": str(model)}, served="mine", environment=venv, gpus_per_replica=1, dtype="bfloat16",
        mem_fraction_static=0.9, max_running_requests=64, flags={"enforce-eager": True},
    )  # fmt: skip
    [one] = plan(config, target)
    assert one.command[:3] == [f"{venv}/bin/vllm", "serve", str(model)]
    assert flags(one.command) == {
        "served-model-name": "mine", "host": "127.0.0.1", "port": "{port}", "tensor-parallel-size": "1",
        "data-parallel-size": "1", "max-model-len": "4096", "gpu-memory-utilization": "0.9", "max-num-seqs": "64",
        "dtype": "bfloat16", "enforce-eager": True,
    }  # fmt: skip
    with pytest.raises(UserError, match="attention_backend: is a setting of SGLang"):
        plan(configured("vllm", environment=venv, attention_backend="flashinfer"), target)


@pytest.mark.parametrize(
    ("kind", "program", "more"),
    [
        ("sglang", "python", {"attention_backend": "flashinfer", "mamba_strategy": "extra_buffer"}),
        ("sglang", "python", {"attention_backend": "triton", "mamba_strategy": "extra_buffer_lazy"}),
        ("vllm", "vllm", {}),
    ],
)
def test_every_flag_of_ours_is_one_of_the_real_server(
    kind: str, program: str, more: dict, target: Path, tmp_path: Path
) -> None:
    """Against what `--help` of the locked versions prints: the name, and whether a value follows and which."""
    venv = environment(tmp_path, program, help_text=HELP_NEW)
    model = {"name": "owner/model", "revision": "abc", "tokenizer": "owner/other", "trust_remote_code": True}
    settings = {
        "gpus_per_replica": 1, "tensor_parallel": 1, "data_parallel": 1, "mem_fraction_static": 0.8,
        "max_running_requests": 8, "dtype": "bfloat16", **more,
    }  # fmt: skip
    gpu, cpu = settings, {**settings, "gpus_per_replica": 0}
    known = recorded(kind)
    for launch in (gpu, cpu):
        [one] = plan(configured(kind, model=model, environment=venv, **launch), target)
        for name, value in flags(one.command[3:]).items():
            wanted = known[f"--{name}"]
            assert (value is True) == (wanted == ""), name
            if wanted.startswith("{"):
                assert value in wanted.strip("{}").split(","), name


@pytest.mark.parametrize(
    ("kind", "launch", "model", "message"),
    [
        ("sglang", {}, {}, "kind `sglang` needs the virtual environment"),
        ("vllm", {"environment": "nowhere"}, {}, "nowhere/bin/vllm does not exist"),
        ("sglang", {"environment": "venv"}, {}, "`embedded:smollm2` is for engine kind `llamacpp`"),
        ("llamacpp", {}, {"name": "owner/model"}, "needs `embedded:smollm2` or a .gguf file, not `owner/model`"),
        ("llamacpp", {}, {"name": "missing.gguf"}, "or a .gguf file, not `missing.gguf`"),
    ],
)
def test_what_cannot_be_launched(
    kind: str, launch: dict, model: dict, message: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(tmp_path, "python")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        plan(configured(kind, model=model, **launch), target)


def test_flags_of_the_user_win() -> None:
    assert with_flags(["x"], {"a": 1, "b": None, "c": True}, {"a": 2, "c": False, "--d_e": "f"}) == [
        "x", "--a", "2", "--d-e", "f",
    ]  # fmt: skip


def test_header_agrees_with_the_gguf_library() -> None:
    path = embedded_model()
    reader, scalars = GGUFReader(path), read_header(path)
    assert scalars["general.architecture"] == "llama"
    for key, value in scalars.items():
        assert reader.get_field(key).contents() == value
    # keys and values of 30 layers x 3 heads x 64 numbers, 2 bytes each
    assert cache_bytes_per_token(path) == 2 * 30 * 3 * 64 * 2


def test_header_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 not a model at all")
    with pytest.raises(UserError, match=r"model\.gguf: not a GGUF file"):
        read_header(path)


def test_slots_give_way_before_the_context_does() -> None:
    assert affordable_slots(wanted=8, context=1000, per_token=10, memory=50_000) == 5
    assert affordable_slots(wanted=8, context=1000, per_token=10, memory=500_000) == 8
    assert affordable_slots(wanted=8, context=1000, per_token=10, memory=9_999) == 0


def test_too_large_a_context_is_said_before_the_start(target: Path) -> None:
    durable.write_json(target / "target.json", {"context_length": 2**33})
    with pytest.raises(UserError, match=r"set a smaller model\.context_length"):
        plan(configured(), target)


def test_embedded_server_has_help() -> None:
    script = Path(embedded_server.__file__)
    done = subprocess.run([sys.executable, "-P", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--slots" in done.stdout


def test_plans_are_json(target: Path) -> None:
    [one] = plan(configured(), target)
    assert json.loads(json.dumps(one.command)) == one.command


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("launch", "tensor", "data"),
    [
        ({"gpus_per_replica": 8}, "8", "1"),
        ({"gpus_per_replica": 8, "data_parallel": 2}, "4", "2"),
        ({"gpus_per_replica": 4, "tensor_parallel": 2, "data_parallel": 2}, "2", "2"),
        ({}, "1", "1"),
        # Who says it in flags is believed, and nothing is said twice.
        ({"gpus_per_replica": 8, "flags": {"tp": 4, "pp-size": 2}}, None, None),
        ({"gpus_per_replica": 8, "flags": {"tp": 8, "nnodes": 1, "node-rank": 0}}, None, None),
        (
            {"gpus_per_replica": 8, "tensor_parallel": 8, "data_parallel": 8, "flags": {"enable_dp_attention": True}},
            "8",
            "8",
        ),
    ],
)
def test_a_server_uses_the_gpus_that_it_takes(kind, launch, tensor, data, target, tmp_path):
    venv = environment(tmp_path, "python", "vllm")
    [one] = plan(configured(kind, model={"name": "owner/model"}, environment=venv, **launch), target)
    found = flags(one.command)
    names = ("tp-size", "dp-size") if kind == "sglang" else ("tensor-parallel-size", "data-parallel-size")
    assert (found.get(names[0]), found.get(names[1])) == (tensor, data)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"tensor_parallel": 8}, "tensor_parallel 8 x data_parallel 1 make 8 GPUs a server, gpus_per_replica is 0"),
        ({"gpus_per_replica": 4, "tensor_parallel": 8}, "make 8 GPUs a server, gpus_per_replica is 4"),
        ({"gpus_per_replica": 8, "tensor_parallel": 4}, "make 4 GPUs a server, gpus_per_replica is 8"),
        ({"gpus_per_replica": 3, "data_parallel": 2}, "make 2 GPUs a server, gpus_per_replica is 3"),
        ({"replicas": 8, "gpus_per_replica": 1, "tensor_parallel": 8}, "make 8 GPUs a server"),
        ({"gpus_per_replica": 8, "flags": {"nnodes": 2, "node-rank": 0}}, "nnodes: a server over several machines"),
        ({"gpus_per_replica": 8, "flags": {"--node_rank": "1"}}, "nnodes: a server over several machines"),
    ],
)
def test_gpus_that_do_not_add_up_are_refused_before_anything_runs(kind, launch, says):
    with pytest.raises(UserError, match=says):
        adapter_for(configured(kind, model={"name": "owner/model"}, environment="venv", **launch))


def test_engines_have_no_shorter_patience_than_we(target, tmp_path, monkeypatch):
    for name in ("SGLANG_WARMUP_TIMEOUT", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_ENGINE_READY_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    venv = environment(tmp_path, "python", "vllm")
    model = {"name": "owner/model"}
    [one] = plan(configured("sglang", model=model, environment=venv, start_timeout=3600), target)
    assert (one.env["SGLANG_WARMUP_TIMEOUT"], flags(one.command)["watchdog-timeout"]) == ("3600", "3600")
    [one] = plan(configured("sglang", model=model, environment=venv, start_timeout=60), target)
    assert flags(one.command)["watchdog-timeout"] == "300"
    [one] = plan(configured("vllm", model=model, environment=venv, start_timeout=3600), target)
    assert one.env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == one.env["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
    monkeypatch.setenv("SGLANG_WARMUP_TIMEOUT", "7")
    [one] = plan(configured("sglang", model=model, environment=venv), target)
    assert "SGLANG_WARMUP_TIMEOUT" not in one.env
    [one] = plan(configured("sglang", model=model, environment=venv, env={"SGLANG_WARMUP_TIMEOUT": "9"}), target)
    assert one.env["SGLANG_WARMUP_TIMEOUT"] == "9"


@pytest.mark.parametrize(
    ("kind", "launch", "sampling", "says"),
    [
        (
            "vllm",
            {"flags": {"speculative_config": "{}"}},
            {"min_p": 0.1},
            "sampling.min_p: vLLM refuses it with speculation",
        ),
        ("sglang", {}, {"repetition_penalty": 2.5}, "sampling.repetition_penalty: SGLang refuses more than 2"),
    ],
)
def test_what_an_engine_would_refuse_of_every_prompt_is_refused_at_once(kind, launch, sampling, says):
    config = configured(kind, model={"name": "owner/model"}, environment="venv", **launch)
    assert adapter_for(config)
    config = config.model_copy(update={"sampling": Sampling(**sampling)})
    with pytest.raises(UserError, match=says):
        adapter_for(config)
