"""Where everything lies that a run writes (docs/architecture.md, *Files*, says what each file is).

`results/` holds what the stages make, `results/state/` what must outlive a rerun. Nothing else spells these paths but
the rules, which declare them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Results:
    """The folder of a run. Shards of a stage lie in `{stage}/{dataset}/{shard}.parquet`."""

    root: Path

    @property
    def state(self) -> "State":
        return State(self.root / "state")

    def shard(self, stage: str, dataset: str, shard: str) -> Path:
        return self.root / stage / dataset / f"{shard}.parquet"

    def prompts_report(self, dataset: str) -> Path:
        return self.root / "prompts" / dataset / "report.json"

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def training(self) -> Path:
        return self.root / "training"

    @property
    def backups(self) -> Path:
        return self.root / "backups"

    @property
    def benchmarks(self) -> Path:
        return self.root / "benchmarks"

    @property
    def progress(self) -> Path:
        return self.root / "progress.json"


@dataclass(frozen=True, slots=True)
class State:
    """The state folder of a run. Jobs of several datasets and machines share it."""

    folder: Path

    @property
    def results(self) -> Results:
        return Results(self.folder.parent)

    # --- what has cost money ---

    @property
    def journals(self) -> Path:
        return self.folder / "journals"

    def journal(self, dataset: str, shard: str) -> Path:
        return self.journals / dataset / f"{shard}.journal"

    def finished(self, dataset: str, shard: str) -> Path:
        """The finished shard, of which the declared output is a hard link."""
        return self.folder / "completions" / dataset / f"{shard}.parquet"

    def unused(self, dataset: str, shard: str) -> Path:
        """Answers to prompts that have left the shard."""
        return self.folder / "completions" / dataset / f"{shard}.unused.parquet"

    # --- money ---

    def account(self, dataset: str, shard: str) -> Path:
        return self.journals / dataset / f"{shard}.budget"

    def accounts(self, dataset: str) -> Iterator[Path]:
        """The accounts of all shards of a dataset that have one."""
        return (self.journals / dataset).glob("*.budget")

    @property
    def accounts_lock(self) -> Path:
        return self.journals / ".budget.lock"

    # --- how far things are ---

    def progress(self, dataset: str, shard: str) -> Path:
        return self.folder / "progress" / dataset / f"{shard}.json"

    @property
    def progress_lock(self) -> Path:
        return self.folder / "progress" / ".lock"

    @property
    def config(self) -> Path:
        """The resolved configuration, as the workflow wrote it."""
        return self.folder / "config.json"

    @property
    def uploads(self) -> Path:
        """The ledger of uploads, a file each."""
        return self.folder / "uploads"

    @property
    def upload_counts(self) -> Path:
        return self.folder / "uploads.json"

    def receipt(self, what: str) -> Path:
        """Declared output of a job whose result must not be deleted before a rerun: backup, training, hidden_states."""
        return self.folder / f"{what}.json"

    # --- servers ---

    @property
    def canaries(self) -> Path:
        """Which endpoints have given the known answer."""
        return self.folder / "canaries"

    @property
    def leases(self) -> Path:
        """Tickets of jobs that use external endpoints."""
        return self.folder / "leases"

    @property
    def servers(self) -> Path:
        """Logs of the servers that were started here."""
        return self.folder / "servers"
