"""What a stage's result depends on: its part of the configuration."""

from typing import Annotated, Any

from scripts.lib.config.model import Config
from scripts.lib.core.secrets import with_digests

Stage = Annotated[str, "target | prompts | completions | tokens | validated | training | hidden_states"]


def stage_settings(config: Config, stage: Stage, dataset: str | None = None) -> dict[str, Any]:
    """Exactly the values that a stage's result depends on, as plain JSON values.

    Snakemake keeps them as params, so that a config edit reruns what it touches and nothing else;
    the journal keeps them to refuse answers of other settings. Operational keys are not among them.
    """
    one = config.datasets[dataset] if dataset else None
    target = config.model.model_dump(mode="json")
    if stage == "target":
        return {"model": target}
    if stage == "prompts":
        assert one is not None
        keys = {
            "data_class", "source", "preset", "format", "fields", "hub_config", "split", "revision", "max_samples",
        }  # fmt: skip
        return {
            "dataset": one.model_dump(mode="json", include=keys) | {"source": _shown(one.source)},
            "shards": config.shards,
            "cleaning": config.cleaning.model_dump(mode="json"),
            "selection": config.selection.model_dump(mode="json"),
            # Prompts too long for the answer to fit are found in stage 1.
            "max_tokens": config.lanes[one.lane].max_tokens if one.data_class == "B" else None,
        }
    if stage == "completions":
        assert one is not None
        keys = {"truncation", "truncation_max_tokens", "token_budget", "cost_budget"}
        extra = {"extra_body": config.engine.extra_body} if config.engine.extra_body else {}
        routing = config.engine.routing and config.engine.routing.model_dump(mode="json")
        return {
            "model": target,
            "sampling": config.sampling.model_dump(mode="json"),
            "max_tokens": config.lanes[one.lane].max_tokens,
            "dataset": one.model_dump(mode="json", include=keys),
            "budget": config.budget.model_dump(mode="json"),
            # Answers of two engines, or of two models under one tokenizer, are not interchangeable.
            "engine": {"kind": config.engine.kind, "served_model": config.served_name, "routing": routing, **extra},
        }
    if stage == "tokens":
        assert one is not None
        return {"dataset": one.model_dump(mode="json", include={"truncation", "reasoning_only"}), "model": target}
    if stage == "validated":
        return {"validation": config.validation.model_dump(mode="json")}
    if stage == "training":
        return {
            "merge": config.merge.model_dump(mode="json", exclude={"may_shrink"}),
            "weights": {name: dataset.weight for name, dataset in config.datasets.items()},
        }
    if stage == "hidden_states":
        return {"model": target, "hidden_states": config.hidden_states.model_dump(mode="json", exclude={"concurrency"})}
    raise ValueError(f"no stage {stage!r}")


def _shown(source: str | list[str] | None) -> str | list[str] | None:
    """A dataset's `source` as it may stand in provenance, params and reports: URLs may hold keys."""
    if isinstance(source, list):
        return [with_digests(one) if "://" in one else one for one in source]
    return with_digests(source) if source and "://" in source else source
