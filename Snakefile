"""Prompt datasets in, the training corpus of a draft model out.

snakemake --cores 8 merge_training      run everything that is missing or stale
snakemake -n                            show what that would be
"""

import os
import shlex
import sys

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.27")
# Jobs run `python -m scripts.<rule>`; this finds the package from any working directory.
sys.path.insert(0, workflow.basedir)
shell.prefix(f"set -euo pipefail; export PYTHONPATH={shlex.quote(str(workflow.basedir))}:${{{{PYTHONPATH:-}}}}; ")

from scripts.lib.core import durable
from scripts.lib.config.model import EXPORT_FORMATS
from scripts.lib.config.file import parse_config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core.errors import UserError, explain
from scripts.lib.engines import adapter_for
from scripts.lib.hidden_states.plan import dry_run as hidden_states_plan
from scripts.lib.hidden_states.plan import require_engine as require_hidden_states_engine
from scripts.lib.engines.environment import names as environment_names
from scripts.lib.prompts.sources import evaluation_files, local_files

# Your own --configfile replaces the example instead of being mixed into its datasets.
if not workflow.configfiles:

    configfile: "config/config.yaml"


try:
    CONFIG = parse_config(config, ", ".join(map(str, workflow.configfiles)))
    adapter_for(CONFIG)
    SOURCES = {name: local_files(name, dataset) for name, dataset in CONFIG.datasets.items()}
    EVALUATION_SETS = evaluation_files(CONFIG.selection.decontaminate)
except UserError as error:
    raise WorkflowError(str(error)) from None

CONFIG_FILE = "results/state/config.json"
DATASETS = list(CONFIG.datasets)
CLASS_A, CLASS_B = CONFIG.by_class("A"), CONFIG.by_class("B")
SHARDS = CONFIG.shard_names()
# The engine's environment, where it is one of envs/ and the servers are started here.
ENVIRONMENT = [
    f".venvs/{name}/drafter-corpus.json"
    for name in environment_names()
    if CONFIG.engine.launch.environment == f".venvs/{name}" and not CONFIG.engine.endpoints
]


wildcard_constraints:
    dataset="[A-Za-z0-9][A-Za-z0-9_-]*",
    shard=r"\d{3}",


rule all:
    """The corpus, and every file on the way to it: a shard that was deleted by hand is made again."""
    input:
        "results/state/training.json",
        expand("results/completions/{dataset}/{shard}.parquet", dataset=CLASS_B, shard=SHARDS),
        expand("results/tokens/{dataset}/{shard}.parquet", dataset=DATASETS, shard=SHARDS),
        expand("results/validated/{dataset}/{shard}.parquet", dataset=DATASETS, shard=SHARDS),


rule prompts:
    """Stage 1 only."""
    input:
        expand("results/prompts/{dataset}/report.json", dataset=DATASETS),


rule completions:
    """Stages 1 and 2 only: everything that needs the servers."""
    input:
        expand("results/completions/{dataset}/{shard}.parquet", dataset=CLASS_B, shard=SHARDS),


include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/environments.smk"
include: "rules/completions.smk"
include: "rules/tokens.smk"
include: "rules/validated.smk"
include: "rules/training.smk"
include: "rules/hidden_states.smk"
include: "rules/exports.smk"
include: "rules/report.smk"


onstart:
    try:
        durable.write_json(CONFIG_FILE, CONFIG.model_dump(mode="json", by_alias=True))
    except OSError as error:
        raise WorkflowError(explain(error)) from None
    if CONFIG.upload.target:
        # Beside the run, never in its way: it ends by itself when this process has ended.
        shell(
            "python -m scripts.upload_results --config {CONFIG_FILE} --results results --watch $PPID"
            " > results/state/upload.log 2>&1 &"
        )


onsuccess:
    shell("python -m scripts.stop_servers --state results/state")


onerror:
    shell("python -m scripts.stop_servers --state results/state")
