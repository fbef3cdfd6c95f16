"""Checks of a GPU host, on folders and outputs made to be wrong in one way each."""

import resource
import socket
import struct
import sys
from pathlib import Path

import orjson
import pytest

from scripts import doctor
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.doctor import host, toolkit
from scripts.lib.doctor.findings import OK, PROBLEM, WARNING, Finding
from scripts.lib.doctor.model_files import check_folder, check_model
from scripts.lib.doctor.report import architecture_of
from scripts.lib.doctor.toolkit import Toolkit

SMI = """\
0, NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 580.82.07, 97887, 0
1, NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 580.82.07, 97887, 31044
"""


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def configured(**engine: object) -> Config:
    model = engine.pop("model", {})
    return parse_config({"datasets": {"a": {"class": "B", "source": "a"}}, "engine": engine, "model": model}, "test")


def test_gpus_of_nvidia_smi() -> None:
    first, second = host.read_gpus(SMI)
    assert (first.capability, first.driver, first.memory) == ("12.0", "580.82.07", 97887)
    assert second.used == 31044
    assert host.read_gpus("No devices were found\n") == []


def test_gpus_against_what_the_run_needs() -> None:
    gpus = host.read_gpus(SMI)
    assert levels(host.check_gpus(gpus, 1, (13, 0), "flashinfer")) == {"gpu": OK, "driver": OK}
    assert levels(host.check_gpus(gpus, 2, (13, 0), "flashinfer"))["gpu memory"] == WARNING
    assert levels(host.check_gpus(gpus, 8, (13, 0), None))["gpu"] == PROBLEM
    assert levels(host.check_gpus(gpus, 1, (14, 0), None))["driver"] == OK  # unknown: not ours to judge
    assert levels(host.check_gpus([], 0, None, None)) == {"gpu": OK}
    assert levels(host.check_gpus([], 1, None, None)) == {"gpu": PROBLEM}
    old = host.read_gpus(SMI.replace("580.82.07", "570.10"))
    assert levels(host.check_gpus(old, 1, (13, 0), None))["driver"] == PROBLEM
    assert levels(host.check_gpus(old, 1, (12, 9), None))["driver"] == OK
    [attention] = [f for f in host.check_gpus(gpus, 1, None, "fa3") if f.check == "attention"]
    assert attention.fix == "set engine.launch.attention_backend: flashinfer"


def test_architecture_as_flashinfer_names_it() -> None:
    assert architecture_of([]) == "120f"
    gpu = host.read_gpus(SMI)[0]
    assert architecture_of([gpu]) == "120f"
    for capability, name in (("12.1", "121a"), ("9.0", "90a"), ("8.9", "89"), ("10.0", "100a")):
        assert architecture_of(host.read_gpus(SMI.replace("12.0", capability))) == name


def test_open_files_against_requests_in_flight() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert host.check_descriptors(1).level == OK
    finding = host.check_descriptors(soft)
    assert finding.level == PROBLEM
    assert finding.fix.startswith("`ulimit -n ")


def test_disk_of_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    assert host.check_disk(tmp_path / "results" / "state", 1, "a run").level == OK
    assert "a run needs about" in host.check_disk(tmp_path, 1 << 60, "a run").detail


def test_endpoints_that_listen_and_that_do_not() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        [found] = host.check_endpoints([url])
        assert found.level == OK
    [found] = host.check_endpoints([url])
    assert found.level == PROBLEM
    assert "Connection refused" in found.detail


def safetensors(path: Path, size: int) -> None:
    header = orjson.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    for part in (1, 2):
        safetensors(folder / f"model-0000{part}-of-00002.safetensors", 100)
    weights = {f"w{part}": f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}
    (folder / "model.safetensors.index.json").write_bytes(orjson.dumps({"weight_map": weights}))
    return folder


def test_whole_model(model: Path) -> None:
    [finding] = check_folder(model)
    assert finding.level == OK
    assert "2 weight files" in finding.detail


@pytest.mark.parametrize("length", [0, 4, 20, 150])
def test_model_file_that_is_cut_off(model: Path, length: int) -> None:
    part = model / "model-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:length])
    [finding] = check_folder(model)
    assert "cut off: model-00002-of-00002.safetensors" in finding.detail


def test_model_file_that_is_missing(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").unlink()
    (model / "config.json").unlink()
    [finding] = check_folder(model)
    assert finding.detail.endswith("missing: config.json, model-00001-of-00002.safetensors")
    assert finding.fix


def test_model_named_in_the_configuration(model: Path, tmp_path: Path) -> None:
    def level(kind: str, name: str, **more: object) -> str:
        return check_model(configured(kind=kind, model={"name": name, **more}))[0].level

    assert level("llamacpp", "embedded:smollm2") == OK
    assert level("llamacpp", "owner/name") == PROBLEM
    assert level("sglang", str(model)) == OK
    assert level("sglang", str(tmp_path / "nowhere")) == PROBLEM
    assert level("sglang", "owner/name") == WARNING
    assert level("sglang", "owner/name", revision="abc") == OK
    (tmp_path / "text.gguf").write_text("no model")
    assert level("llamacpp", str(tmp_path / "text.gguf")) == PROBLEM


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit as pip leaves it: the compiler newer than the headers, libraries under one name only."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    home = packages / "nvidia" / "cu13"
    for folder in ("bin", "include", "lib"):
        (home / folder).mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    (home / "lib" / "libcudart.so.13").touch()
    for name, version in (("nvidia_cuda_nvcc", "13.5.37"), ("nvidia_nvvm", "13.0.88"), ("flashinfer_python", "0.7.2")):
        metadata = packages / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    compiler(home, "13.5")
    (tmp_path / "venv" / "bin").mkdir()
    return home


def compiler(home: Path, version: str) -> None:
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!{sys.executable}\nprint('Cuda compilation tools, release {version}, V{version}.37')\n")
    nvcc.chmod(0o755)


def test_toolkit_of_the_environment_is_found(home: Path) -> None:
    found = toolkit.find_toolkit(home.parents[4])
    assert found == Toolkit(home, home.parents[4])
    assert found.own
    assert found.installed() == {"nvidia-cuda-nvcc": "13.5.37", "nvidia-nvvm": "13.0.88", "flashinfer-python": "0.7.2"}


def test_compiler_and_headers_of_two_versions(home: Path) -> None:
    found = Toolkit(home, home.parents[4])
    [finding] = toolkit.check_compiler(found)
    assert finding.detail == "nvcc 13.5, headers 13.0 (nvidia-cuda-nvcc 13.5.37)"
    assert finding.fix.endswith("'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*'")
    compiler(home, "13.0")
    assert "(nvidia-cuda-nvcc 13.5.37)" in toolkit.check_compiler(found)[0].detail  # only its metadata is wrong
    [finding] = toolkit.check_compiler(Toolkit(home, None))
    assert finding.level == OK
    (home / "bin" / "nvcc").unlink()
    assert toolkit.check_compiler(found)[0].detail.endswith("no such program")
    (home / "include" / "cuda_runtime_api.h").unlink()
    assert toolkit.check_compiler(found)[0].check == "headers"


def test_library_names_are_mended_once(home: Path) -> None:
    found = Toolkit(home, home.parents[4])
    findings = toolkit.check_libraries(found)
    assert [finding.check for finding in findings] == ["lib64", "libcudart", "libcuda"]
    for finding in findings:
        finding.apply()
    assert (home / "lib64" / "libcudart.so").resolve().name == "libcudart.so.13"
    assert (home / "lib64" / "stubs" / "libcuda.so").exists()
    assert [finding.level for finding in toolkit.check_libraries(found)] == [OK]


def test_system_toolkit_is_not_ours_to_change(home: Path) -> None:
    assert all(finding.fix and not finding.apply for finding in toolkit.check_libraries(Toolkit(home, None)))


def test_missing_cccl_headers(home: Path) -> None:
    found = Toolkit(home, home.parents[4])
    [finding] = toolkit.check_cccl(found)
    assert "'nvidia-cuda-cccl==13.0.*'" in finding.fix
    (home / "include" / "cccl" / "nv").mkdir(parents=True)
    (home / "include" / "cccl" / "nv" / "target").touch()
    assert toolkit.check_cccl(found)[0].level == OK


def test_flashinfer_against_the_architecture_and_its_own_parts(home: Path) -> None:
    found = Toolkit(home, home.parents[4])
    assert toolkit.check_flashinfer(found, "120f")[0].level == OK
    compiler(home, "12.8")
    assert "SM12x kernels need CUDA 12.9" in toolkit.check_flashinfer(found, "120f")[0].detail
    assert toolkit.check_flashinfer(found, "90a")[0].level == OK
    metadata = home.parents[1] / "flashinfer_cubin-0.6.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: 0.6.1\n")
    assert "flashinfer-cubin 0.6.1 beside flashinfer-python 0.7.2" in toolkit.check_flashinfer(found, "90a")[0].detail


def test_proof_tells_what_the_compiler_said(home: Path) -> None:
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'warning: x'\necho 'proof.cu(1): error: no such architecture'\nexit 2\n")
    finding = toolkit.prove(Toolkit(home, None), "120f")
    assert finding.level == PROBLEM
    assert finding.detail == "a kernel for sm_120f does not compile: proof.cu(1): error: no such architecture"


def test_entry_on_a_machine_without_gpus(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "config.json"
    values = {"datasets": {"a": {"class": "B", "source": "a"}}, "lanes": {"short": {"max_tokens": 9, "concurrency": 9}}}
    config.write_bytes(orjson.dumps(values))
    assert doctor.main(["--config", str(config), "--state", str(tmp_path)]) == 0
    assert "SmolLM2" in capsys.readouterr().out
    assert doctor.main(["--environment", str(tmp_path)]) == 1
    assert "not a virtual environment" in capsys.readouterr().err
