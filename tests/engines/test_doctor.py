"""The doctor on the toolkit that pip really puts together: broken, mended, and a kernel as proof."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import doctor

pytestmark = pytest.mark.engines

# What `pip install sglang==0.5.23` brings of CUDA: the compiler of today beside the headers that its torch pins.
BROKEN = [
    "nvidia-cuda-nvcc==13.5.*",
    "nvidia-cuda-crt==13.5.*",
    "nvidia-nvvm==13.5.*",
    "nvidia-cuda-runtime==13.0.96",
    "flashinfer-python==0.7.2",
]


def test_doctor_cures_a_fresh_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "--quiet", "--no-deps", *BROKEN], check=True)
    examine = ["--environment", str(environment), "--architecture", "120f", "--state", str(tmp_path / "state")]

    assert doctor.main(examine) == 1
    output, error = capsys.readouterr()
    assert "nvcc 13.5, headers 13.0" in output
    assert "CUDA compiler and CUDA toolkit headers are incompatible" in output
    for name in ("lib64", "libcudart", "libcuda"):
        assert f"problem  {name}" in output
    assert "5 problems (`--fix` mends 4 of them)" in error

    assert doctor.main([*examine, "--fix"]) == 0
    assert "a kernel for sm_120f compiles and links" in capsys.readouterr().out

    assert doctor.main(examine) == 0
    output = capsys.readouterr().out
    assert "nvcc 13.0, headers 13.0" in output
    assert "problem" not in output
