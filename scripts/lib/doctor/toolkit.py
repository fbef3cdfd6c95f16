"""The CUDA toolkit inside an engine's environment, which compiles kernels at run time.

pip puts together a toolkit from wheels that don't fit each other: a fresh `pip install sglang`
(0.5.23) brings nvcc 13.5 beside headers of 13.0, and libraries under names that no linker looks for
(flashinfer issues #3493, #5064, vllm issue #44305). The first kernel that FlashInfer compiles, minutes
into the start of a server, then fails. These checks find that beforehand, and `prove` compiles and
links a kernel the way FlashInfer does (flashinfer/jit/cpp_ext.py), which needs no GPU.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.doctor.findings import OK, PROBLEM, WARNING, Finding, run
from scripts.lib.doctor.host import version_pair

# The compiler's parts come as three wheels that must agree.
_COMPILER_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
_PROOF = """\
#include <cuda.h>
#include <cuda_runtime.h>
{cccl}
__global__ void scale(float* values, float factor, int count) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= factor;
}}
extern "C" int versions(float* values, int count) {{
  int driver = 0, runtime = 0;
  cuDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  scale<<<(count + 255) / 256, 256>>>(values, 2.0f, count);
  return driver + runtime + (int)cudaGetLastError();
}}
"""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: `home` holds bin/nvcc; `environment` is the virtual environment whose wheels made it, if any."""

    home: Path
    environment: Path | None

    @property
    def own(self) -> bool:
        """Whether the environment's wheels made it, so that mending it touches nothing else."""
        return self.environment is not None and self.home.is_relative_to(self.environment)

    @property
    def site_packages(self) -> Path | None:
        """Where the environment's packages lie."""
        return (
            next(iter(sorted(self.environment.glob("lib/python3.*/site-packages"))), None) if self.environment else None
        )

    def installed(self) -> dict[str, str]:
        """Versions of the environment's distributions."""
        if self.site_packages is None:
            return {}
        found = importlib.metadata.distributions(path=[str(self.site_packages)])
        return {distribution.metadata["Name"].lower().replace("_", "-"): distribution.version for distribution in found}

    def headers(self) -> tuple[int, int] | None:
        """CUDA version of the headers: CUDART_VERSION 13000 is 13.0."""
        with contextlib.suppress(OSError):
            text = (self.home / "include" / "cuda_runtime_api.h").read_text(errors="replace")
            if found := re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE):
                return int(found[1]) // 1000, int(found[1]) % 1000 // 10
        return None

    def compiler(self) -> tuple[int, int] | None:
        """CUDA version of nvcc, None when it doesn't run."""
        code, output = run([str(self.home / "bin" / "nvcc"), "--version"])
        found = re.search(r"release (\d+\.\d+)", output)
        return version_pair(found[1]) if code == 0 and found else None

    def cccl(self) -> list[Path]:
        """Include folders of the CCCL headers that come with FlashInfer, which it puts before the toolkit's."""
        data = self.site_packages / "flashinfer" / "data" / "cccl" if self.site_packages else None
        if data is None or not data.is_dir():
            return []
        return [
            folder for folder in (data / "cub", data / "libcudacxx" / "include", data / "thrust") if folder.is_dir()
        ]


def find_toolkit(environment: Path | None) -> Toolkit | None:
    """The toolkit that a server of this environment would use: CUDA_HOME, its own wheels, or the system's."""
    if named := os.environ.get("CUDA_HOME"):
        return Toolkit(Path(named), environment)
    if environment is not None:
        found = sorted(environment.absolute().glob("lib/python3.*/site-packages/nvidia/cu*/bin/nvcc"))
        if found:
            return Toolkit(found[-1].parents[1], environment.absolute())
    nvcc = shutil.which("nvcc")
    home = Path(nvcc).resolve().parents[1] if nvcc else Path("/usr/local/cuda")
    return Toolkit(home, environment and environment.absolute()) if (home / "bin" / "nvcc").exists() else None


def _pip(environment: Path | None, *wheels: str) -> tuple[str, Callable[[], None] | None]:
    """The command that installs wheels without touching anything else, and a call that runs it.

    None for `environment` is a toolkit that isn't ours to change.
    """
    if environment is None:
        return "install one whole CUDA toolkit", None
    python = environment / "bin" / "python"
    arguments = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", *wheels]

    def apply() -> None:
        code, output = run([str(python), *arguments], seconds=1800)
        if code:
            raise RuntimeError(f"pip failed:\n{output}")

    return f"{python} " + " ".join(f"'{a}'" if "*" in a else a for a in arguments), apply


def check_compiler(toolkit: Toolkit) -> list[Finding]:
    """nvcc and the headers must be of one version: CCCL refuses anything else (cuda_toolkit.h)."""
    headers, compiler = toolkit.headers(), toolkit.compiler()
    own = toolkit.environment if toolkit.own else None
    if headers is None:
        fix, apply = _pip(own, "nvidia-cuda-runtime")
        return [Finding("headers", PROBLEM, f"{toolkit.home}/include has no cuda_runtime_api.h", fix, apply)]
    fix, apply = _pip(own, *(f"{name}=={headers[0]}.{headers[1]}.*" for name in _COMPILER_WHEELS))
    if compiler is None:
        code, output = run([str(toolkit.home / "bin" / "nvcc"), "--version"])
        last = (output.strip().splitlines() or [f"exit code {code}"])[-1]
        return [Finding("nvcc", PROBLEM, f"{toolkit.home}/bin/nvcc does not run: {last}", fix, apply)]
    versions = toolkit.installed()
    parts = {name: version_pair(versions[name]) for name in _COMPILER_WHEELS if own and name in versions}
    odd = sorted(f"{name} {versions[name]}" for name, version in parts.items() if version != headers)
    text = f"nvcc {compiler[0]}.{compiler[1]}, headers {headers[0]}.{headers[1]}"
    if compiler != headers or odd:
        return [Finding("nvcc", PROBLEM, text + (f" ({', '.join(odd)})" if odd else ""), fix, apply)]
    return [Finding("nvcc", OK, text)]


def _link(name: Path, target: Path | str) -> Callable[[], None]:
    def apply() -> None:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        name.symlink_to(target)

    return apply


def driver_library() -> Path | None:
    """libcuda.so.1 of the NVIDIA driver, None without one."""
    _, output = run(["/sbin/ldconfig", "-p"])
    found = re.search(r"libcuda\.so\.1 .*=> (\S+)", output)
    return Path(found[1]) if found else None


def check_libraries(toolkit: Toolkit) -> list[Finding]:
    """The names that `-L$CUDA_HOME/lib64 -L$CUDA_HOME/lib64/stubs -lcudart -lcuda` looks for."""
    home, findings = toolkit.home, []
    lib64, lib = home / "lib64", home / "lib"
    if not lib64.exists() and lib.is_dir():
        fix = f"ln -s lib {lib64}"
        findings.append(Finding("lib64", PROBLEM, f"{lib64} does not exist", fix, _link(lib64, "lib")))
    folder = lib if lib.is_dir() else lib64
    runtimes = sorted(folder.glob("libcudart.so.*"))
    name = folder / "libcudart.so"
    if not name.exists():
        if runtimes:
            fix = f"ln -s {runtimes[-1].name} {name}"
            findings.append(
                Finding("libcudart", PROBLEM, f"{name} does not exist", fix, _link(name, runtimes[-1].name))
            )
        else:
            findings.append(Finding("libcudart", PROBLEM, f"{folder} has no libcudart", "install nvidia-cuda-runtime"))
    stub = folder / "stubs" / "libcuda.so"
    if not stub.exists() and not (folder / "libcuda.so").exists():
        if driver := driver_library():
            fix, apply = f"mkdir -p {stub.parent}; ln -s {driver} {stub}", _link(stub, driver)
        else:
            command = ["gcc", "-shared", "-o", str(stub), "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"]
            fix = f"mkdir -p {stub.parent}; {' '.join(command)} (no driver here: an empty library to link against)"

            def apply() -> None:
                stub.parent.mkdir(parents=True, exist_ok=True)
                code, output = run(command)
                if code:
                    raise RuntimeError(output)

        findings.append(Finding("libcuda", PROBLEM, f"{stub} does not exist", fix, apply))
    if not toolkit.own:  # the system's: not ours to change
        for finding in findings:
            finding.apply = None
    return findings or [Finding("libraries", OK, "libcudart and libcuda are where FlashInfer links them")]


def mend_libraries(environment: Path, say: Callable[[str], None]) -> None:
    """Give the toolkit of an environment's own wheels the names that linkers look for."""
    toolkit = find_toolkit(environment)
    if toolkit and toolkit.own:
        for finding in check_libraries(toolkit):
            if finding.apply:
                say(f"{finding.check}: {finding.fix}")
                finding.apply()


def check_cccl(toolkit: Toolkit) -> list[Finding]:
    """CCCL's <nv/target>, which CUDA's own half-precision headers include."""
    for folder in (*toolkit.cccl(), toolkit.home / "include", toolkit.home / "include" / "cccl"):
        if (folder / "nv" / "target").exists():
            return [Finding("cccl", OK, f"headers in {folder}")]
    headers = toolkit.headers() or (13, 0)
    wheel = f"nvidia-cuda-cccl=={headers[0]}.{headers[1]}.*"
    fix, apply = _pip(toolkit.environment, wheel) if toolkit.environment else ("install a whole CUDA toolkit", None)
    return [Finding("cccl", PROBLEM, "<nv/target> of CCCL is nowhere", fix, apply)]


def check_flashinfer(toolkit: Toolkit, architecture: str) -> list[Finding]:
    """FlashInfer's parts against each other and against the GPU's architecture."""
    versions = toolkit.installed()
    version = versions.get("flashinfer-python")
    if version is None:
        return []
    findings = []
    for part in ("flashinfer-cubin", "flashinfer-jit-cache"):
        if part in versions and version_pair(versions[part]) and versions[part].split("+")[0] != version:
            fix, apply = _pip(toolkit.environment, f"{part}=={version}")
            findings.append(
                Finding(
                    "flashinfer", PROBLEM, f"{part} {versions[part]} beside flashinfer-python {version}", fix, apply
                )
            )
    compiler = toolkit.compiler()
    if architecture.startswith("12") and compiler and compiler < (12, 9):
        findings.append(
            Finding(
                "flashinfer",
                PROBLEM,
                f"SM12x kernels need CUDA 12.9 or newer, nvcc is {compiler[0]}.{compiler[1]} (flashinfer PR #3633)",
                "make the environment anew: `python -m scripts.create_environment --name sglang --output DIR`",
            )
        )
    return findings or [Finding("flashinfer", OK, version)]


def check_build_tools(toolkit: Toolkit) -> list[Finding]:
    """ninja and a C++ compiler, which FlashInfer calls by name."""
    path = os.pathsep.join(
        filter(None, [str(toolkit.environment / "bin") if toolkit.environment else None, os.environ.get("PATH")])
    )
    findings = []
    if shutil.which("ninja", path=path) is None:
        fix, apply = _pip(toolkit.environment, "ninja") if toolkit.environment else ("install ninja", None)
        findings.append(Finding("ninja", PROBLEM, "no ninja on PATH", fix, apply))
    if shutil.which(os.environ.get("CXX", "c++"), path=path) is None:
        findings.append(Finding("c++", PROBLEM, "no C++ compiler on PATH", "apt-get install g++"))
    return findings or [Finding("build tools", OK, "ninja and c++ found")]


def prove(toolkit: Toolkit, architecture: str) -> Finding:
    """Compile and link a kernel for `architecture` (such as `120f`), with FlashInfer's own flags."""
    include = [*(f"-I{folder}" for folder in toolkit.cccl()), "-isystem", str(toolkit.home / "include")]
    cccl = "#include <cuda/std/cstdint>" if toolkit.cccl() else ""
    with tempfile.TemporaryDirectory() as folder:
        source, compiled, linked = (Path(folder) / name for name in ("proof.cu", "proof.o", "proof.so"))
        source.write_text(_PROOF.format(cccl=cccl))
        nvcc = [str(toolkit.home / "bin" / "nvcc"), *include, "--compiler-options=-fPIC", "--expt-relaxed-constexpr"]
        nvcc += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-c", str(source), "-o", str(compiled)]
        lib64 = toolkit.home / "lib64"
        link = [os.environ.get("CXX", "c++"), str(compiled), "-shared", f"-L{lib64}", f"-L{lib64 / 'stubs'}"]
        for what, command in (("compile", nvcc), ("link", [*link, "-lcudart", "-lcuda", "-o", str(linked)])):
            code, output = run(command, seconds=600)
            if code:
                wrong = [line for line in output.splitlines() if "error" in line or "cannot find" in line]
                first = (wrong or output.strip().splitlines() or [f"exit code {code}"])[0]
                return Finding("proof", PROBLEM, f"a kernel for sm_{architecture} does not {what}: {first.strip()}")
    return Finding("proof", OK, f"a kernel for sm_{architecture} compiles and links")


def check_toolkit(environment: Path | None, architecture: str) -> list[Finding]:
    """All checks of the toolkit but the proof."""
    toolkit = find_toolkit(environment)
    if toolkit is None:
        fix = "install nvidia-cuda-nvcc into the engine's environment, or a CUDA toolkit"
        return [Finding("toolkit", PROBLEM, "no CUDA toolkit", fix)]
    findings = [Finding("toolkit", OK, str(toolkit.home))]
    if toolkit.environment and not toolkit.own:
        findings.append(
            Finding("toolkit", WARNING, f"it is not the environment's own ({toolkit.environment})", "`unset CUDA_HOME`")
        )
    for check in (check_compiler, check_libraries, check_cccl, check_build_tools):
        findings += check(toolkit)
    return findings + check_flashinfer(toolkit, architecture)
