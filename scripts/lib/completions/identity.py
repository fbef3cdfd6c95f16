"""What answers depend on: answers of another identity are never mixed with those of this one."""

from typing import Any

from scripts.lib.config.model import Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.target.model import Target


def identity(config: Config, dataset: str, target: Target) -> dict[str, Any]:
    """The settings that answers depend on. Answers of another identity are refused.

    Budgets say how many answers there are, not what they are; `drop` is `keep` plus a later stage.
    """
    settings = stage_settings(config, "completions", dataset)
    settings.pop("budget")
    one = dict(settings["dataset"])
    for name in ("token_budget", "cost_budget"):
        one.pop(name)
    if one["truncation"] == "drop":
        one["truncation"] = "keep"
    return {
        **settings,
        "dataset": one,
        "target": {"tokenizer": target.tokenizer_hash, "template": target.template_hash},
    }
