"""What a check found: one line, the exact fix, and, where that only touches the environment, doing it."""

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass
class Finding:
    """The result of one check.

    `fix` says what to do, as a command where one does it. `apply` does it, and is there only for
    fixes that touch nothing but the engine's own environment.
    """

    check: str
    level: str
    detail: str
    fix: str | None = None
    apply: Callable[[], None] | None = None

    def lines(self) -> list[str]:
        """For the screen."""
        return [f"{self.level:8} {self.check:14} {self.detail}", *([f"{'':8} fix: {self.fix}"] if self.fix else [])]


def run(command: list[str], seconds: float = 60) -> tuple[int, str]:
    """Exit code and combined output of a command; 127 when there is no such program."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, errors="replace"
        )
    except FileNotFoundError:
        return 127, f"{command[0]}: no such program"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]}: no answer within {seconds:.0f} s"
    return done.returncode, done.stdout


def worst(findings: Iterable[Finding]) -> str:
    """The most serious level among findings."""
    levels = {finding.level for finding in findings}
    return PROBLEM if PROBLEM in levels else WARNING if WARNING in levels else OK
