"""What a finished shard of completions says about itself."""

from typing import Any

from scripts.lib.completions.job import ShardJob
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import durable
from scripts.lib.core.provenance import code_version
from scripts.lib.core.records import read_provenance
from scripts.lib.engines.base import EngineFacts
from scripts.lib.target.model import Target


def shard_provenance(job: ShardJob, target: Target, facts: EngineFacts | None) -> dict[str, Any]:
    """The metadata of the finished shard; `facts` is what the last endpoint told of itself, None when none was asked."""
    engine = job.config.engine
    return {
        "stage": "completions",
        "dataset": job.dataset,
        "shard": job.shard,
        "settings": stage_settings(job.config, "completions", job.dataset),
        "target": target.provenance(),
        "engine": {
            "kind": engine.kind,
            "version": facts.version if facts else None,
            "launch": engine.launch.model_dump(mode="json", exclude={"env"}),
        },
        "prompts": {"sha256": durable.sha256_file(job.prompts), "provenance": read_provenance(job.prompts)},
        "code": code_version(),
    }
