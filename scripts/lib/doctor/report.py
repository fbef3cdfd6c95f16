"""The examination as a whole: check, mend if asked to, prove, say."""

from collections.abc import Callable
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.doctor import host, toolkit
from scripts.lib.doctor.findings import PROBLEM, Finding, worst
from scripts.lib.doctor.gpu_host import check_gpu_host
from scripts.lib.doctor.model_files import check_model


def architecture_of(gpus: list[host.Gpu]) -> str:
    """nvcc's name of the GPUs' architecture, in the form that FlashInfer compiles for; SM120 without a GPU."""
    capability = gpus[0].capability if gpus else "12.0"
    number = capability.replace(".", "")
    if number == "120":
        return "120f"
    return number + ("a" if int(number) >= 90 else "")


def examine(
    config: Config | None,
    environment: Path | None,
    state: Path,
    architecture: str | None,
    fix: bool,
    say: Callable[[str], None],
) -> None:
    """Print what is right and wrong; with `fix`, mend what only touches the environment and look again.

    Raises UserError when problems are left.
    """
    gpus = host.installed_gpus()
    architecture = architecture or architecture_of(gpus)
    launch = config.engine.launch if config and not config.engine.endpoints else None
    if environment is None and launch and launch.environment:
        environment = Path(launch.environment)
    if environment is not None and not (environment / "bin" / "python").exists():
        raise UserError(
            f"{environment}: not a virtual environment: make one with `python -m scripts.create_environment`"
        )
    found = toolkit.find_toolkit(environment)
    findings = host.check_host(config, state, gpus, found.headers() if found else None)
    if launch and launch.gpus_per_replica:
        findings += check_gpu_host(gpus, launch)
    findings += check_model(config) if config else []
    # A run without GPUs compiles nothing.
    if environment is not None or bool(launch and launch.gpus_per_replica):
        tools = toolkit.check_toolkit(environment, architecture)
        if fix and any(finding.apply for finding in tools):
            _mend(tools, say)
            tools = toolkit.check_toolkit(environment, architecture)
            found = toolkit.find_toolkit(environment)
        findings += tools
        if found:
            findings.append(toolkit.prove(found, architecture))
    for finding in findings:
        for line in finding.lines():
            say(line)
    if worst(findings) == PROBLEM:
        count = sum(finding.level == PROBLEM for finding in findings)
        mendable = sum(finding.apply is not None for finding in findings)
        hint = f" (`--fix` mends {mendable} of them)" if mendable else ""
        raise UserError(f"{count} problems{hint}: see above")


def _mend(findings: list[Finding], say: Callable[[str], None]) -> None:
    for finding in findings:
        if finding.apply:
            say(f"mending  {finding.check:14} {finding.fix}")
            try:
                finding.apply()
            except (OSError, RuntimeError) as error:
                raise UserError(f"{finding.check}: the fix failed: {error}") from None
