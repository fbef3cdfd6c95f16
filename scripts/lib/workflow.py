"""What the rules need to know, worked out from the configuration when the workflow is read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import EXPORT_FORMATS, Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError, explain
from scripts.lib.core.paths import Results
from scripts.lib.engines import adapter_for
from scripts.lib.engines.environment import names as environment_names
from scripts.lib.hidden_states import plan as hidden_states
from scripts.lib.prompts.sources import evaluation_files, local_files

RESULTS = Results(Path("results"))


@dataclass(frozen=True)
class RunPlan:
    """The whole plan: it is known before anything runs."""

    config: Config
    sources: dict[str, list[str]]  # local files of each dataset
    evaluation_sets: list[str]

    @classmethod
    def of(cls, values: dict[str, Any], files: Iterable[Path | str]) -> "RunPlan":
        """From the merged values of the configuration files. Raises UserError."""
        config = parse_config(values, ", ".join(map(str, files)))
        adapter_for(config)  # which knows more of what its engine can't do
        sources = {name: local_files(name, dataset) for name, dataset in config.datasets.items()}
        return cls(config, sources, evaluation_files(config.selection.decontaminate))

    @property
    def datasets(self) -> list[str]:
        return list(self.config.datasets)

    @property
    def shards(self) -> list[str]:
        return self.config.shard_names()

    @property
    def answered(self) -> list[str]:
        """Datasets of class B."""
        return self.config.by_class("B")

    @property
    def ready(self) -> list[str]:
        """Datasets of class A."""
        return self.config.by_class("A")

    @property
    def shard_files(self) -> list[str]:
        """Every shard of the stages that the corpus comes from."""
        stages = {"completions": self.answered, "tokens": self.datasets, "validated": self.datasets}
        names = [(stage, name, shard) for stage, names in stages.items() for name in names for shard in self.shards]
        return [str(RESULTS.shard(*name)) for name in names]

    def settings(self, stage: str, dataset: str | None = None) -> dict[str, Any]:
        """What a job's result depends on: an edit of anything else reruns nothing."""
        return stage_settings(self.config, stage, dataset)

    def before(self, dataset: str) -> list[str]:
        """Datasets that keep a prompt which this one has as well: those that are named before it."""
        across = self.config.selection.deduplicate == "across"
        return self.datasets[: self.datasets.index(dataset)] if across else []

    environments = environment_names()
    export_formats = EXPORT_FORMATS

    @property
    def environment(self) -> list[str]:
        """Of the servers, where it is one of envs/ and they are started here."""
        launched = None if self.config.engine.endpoints else self.config.engine.launch.environment
        return [f"{launched}/drafter-corpus.json" for name in self.environments if launched == f".venvs/{name}"]

    def hidden_states_receipt(self) -> str:
        """Raises UserError when the engine has no hidden states, before a corpus is made for nothing."""
        hidden_states.require_engine(self.config)
        return str(RESULTS.state.receipt("hidden_states"))

    def hidden_states_lost(self) -> bool:
        """Whether files were removed by hand: they are not among the declared outputs."""
        receipt, manifest = RESULTS.state.receipt("hidden_states"), RESULTS.root / "hidden_states" / "manifest.json"
        return receipt.exists() and not manifest.exists()

    def hidden_states_size(self) -> str:
        return hidden_states.dry_run(self.config, RESULTS.training)

    def begin(self) -> None:
        """Before the first job: its configuration is written, and shards that Snakemake would delete are kept.

        Raises UserError.
        """
        from scripts.lib.completions.adoption import adopt  # here: a plan needs no Parquet

        try:
            durable.write_json(RESULTS.state.config, self.config.model_dump(mode="json", by_alias=True))
            adopt(RESULTS)
        except OSError as error:
            raise UserError(explain(error)) from None
