"""Prompt datasets in, the training corpus of a draft model out.

snakemake --cores 8 merge_training      run everything that is missing or stale
snakemake -n                            show what that would be
"""

import shlex
import sys

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.27")
# Jobs run `python -m scripts.<rule>`; this finds the package from any working directory.
sys.path.insert(0, workflow.basedir)
shell.prefix(f"set -euo pipefail; export PYTHONPATH={shlex.quote(str(workflow.basedir))}:${{{{PYTHONPATH:-}}}}; ")

from scripts.lib.core.errors import UserError
from scripts.lib.workflow import RunPlan

# Your own --configfile replaces the example instead of being mixed into its datasets.
if not workflow.configfiles:

    configfile: "config/config.yaml"


try:
    PLAN = RunPlan.of(config, workflow.configfiles)
except UserError as error:
    raise WorkflowError(str(error)) from None


rule all:
    """The corpus, and every file on the way to it: a shard that was deleted by hand is made again."""
    input:
        "results/state/training.json",
        PLAN.shard_files,


for name in "target prompts environments completions tokens validated training hidden_states exports report".split():

    include: f"rules/{name}.smk"


onstart:
    try:
        PLAN.begin()
    except UserError as error:
        raise WorkflowError(str(error)) from None
    uploads(BESIDE_THE_RUN)


onsuccess:
    shell(STOP_SERVERS)
    uploads("--brief")


onerror:
    shell(STOP_SERVERS)
    uploads("--tell")
