"""What became of a dataset's rows, stage by stage, from the source to the samples that a merge reads."""

from pathlib import Path
from typing import Any

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError

REPORT = "report.json"


def funnels(summary: dict[str, Any], prompts: Path) -> dict[str, dict[str, Any]]:
    """The funnel of each dataset in validation's summary, preceded by the reports of `prepare_prompts` if there.

    Keys, in order: `source_rows`, `dropped` (by reason), `prompts`, `outcomes` (class B),
    `without_sample` (prompts, by outcome), `samples`, `rejected` (by check), `passed`.
    Raises UserError when the summary isn't one or when a funnel doesn't add up.
    """
    found = {}
    for name, totals in summary.get("datasets", {}).items():
        funnel: dict[str, Any] = {}
        report = prompts / name / REPORT
        if report.is_file():
            source = durable.read_json(report)
            funnel["source_rows"] = source["rows"]
            funnel["dropped"] = {reason: entry["count"] for reason, entry in source["reasons"].items()}
            funnel["kept"] = source["kept"]
        try:
            for key in ("prompts", "outcomes", "without_sample", "samples"):
                funnel[key] = totals[key]
            funnel["rejected"] = totals["rejects"]
            funnel["passed"] = totals["passed"]
        except KeyError as error:
            raise UserError(
                f"summary of validation: {name}: has no {error}: make it anew with summarize_validation"
            ) from None
        for problem in imbalances(funnel):
            raise UserError(f"summary of validation: {name}: {problem}: make the stages before it anew")
        found[name] = funnel
    return found


def imbalances(funnel: dict[str, Any]) -> list[str]:
    """Where a funnel doesn't add up, one line each."""
    problems = []
    if "source_rows" in funnel:
        if funnel["source_rows"] != sum(funnel["dropped"].values()) + funnel["kept"]:
            problems.append(f"dropped and kept don't add up to the {funnel['source_rows']} source rows")
        if funnel["kept"] != funnel["prompts"]:
            problems.append(f"{funnel['kept']} prompts were prepared, {funnel['prompts']} were validated")
    if funnel["outcomes"] and sum(funnel["outcomes"].values()) != funnel["prompts"]:
        problems.append(f"the outcomes don't add up to the {funnel['prompts']} prompts")
    for outcome, count in funnel["without_sample"].items():
        if count > funnel["outcomes"].get(outcome, 0):
            problems.append(f"{count} prompts without sample ended as {outcome}, more than there are")
    if funnel["samples"] != sum(funnel["rejected"].values()) + funnel["passed"]:
        problems.append(f"rejected and passed don't add up to the {funnel['samples']} samples")
    return problems
