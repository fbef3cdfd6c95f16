"""The page: everything gathered, judged, drawn and put into one HTML file that needs nothing else."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from scripts.lib.config.model import Config
from scripts.lib.core import durable
from scripts.lib.core.provenance import code_version
from scripts.lib.core.units import duration, short
from scripts.lib.report import plots
from scripts.lib.report.answers import TurnSums
from scripts.lib.report.comparisons import changed, earlier_mean
from scripts.lib.report.costs import Speed, generation_speed, rule_costs, union
from scripts.lib.report.excerpts import excerpts, refused
from scripts.lib.report.ledger import ledger_of
from scripts.lib.report.origins import OriginFact, origins, without_folders
from scripts.lib.report.run import DatasetRun, Run, gather
from scripts.lib.report.suspicion import LOOK, NOTE, WRONG, Suspicion
from scripts.lib.report.suspicions import CHECKED, suspicions
from scripts.lib.validated.lengths import Lengths

ENDPOINTS = 32  # rows of the table of endpoints; the others are added up
Tile = tuple[str, str, str]  # what, value, remark


def now() -> datetime:
    """The time that the page carries."""
    return datetime.now(UTC)


def write_report(config: Config, results: Path, output: Path, clock: Callable[[], datetime] = now) -> list[Suspicion]:
    """Write the report of the run in `results` to `output`. Returns the findings, the worst first.

    A stage that hasn't run is shown as not done. Memory holds one row group, whatever the size of the run.
    Raises UserError when `results` is not there, or a file in it is broken.
    """
    run = gather(config, results)
    ledgers = {name: ledger_of(one) for name, one in run.datasets.items()}
    facts, stale = origins(run)
    found = suspicions(run, ledgers, facts, stale)
    costs, measured = rule_costs(run.results)
    speed, generating = generation_speed(run)
    limits = plots.token_range(run)
    page = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=config.model.name,
            made=clock(),
            code=code_version(),
            run=run,
            status=_status(run),
            stages=_stages(run),
            tiles=_tiles(run, speed, union([*measured, *generating])),
            findings=found,
            levels={WRONG: "Wrong", LOOK: "Look", NOTE: "Note"},
            checked=CHECKED,
            ledgers=ledgers,
            totals=_totals(ledgers),
            means=_markup(plots.mean_answers(run)),
            earlier={name: earlier_mean(run, name) for name in run.datasets},
            changed={name for name, one in run.datasets.items() if changed(run, one)},
            outcomes=_markup(plots.outcomes(run)),
            legend=_legend(run),
            histograms={name: _markup(plots.lengths(one, limits)) for name, one in run.datasets.items()},
            measures={name: _measures(one) for name, one in run.datasets.items()},
            costs=costs,
            largest_span=max((cost.span for cost in costs), default=0.0),
            endpoints=_endpoints(run),
            speed=speed,
            facts=_shared(facts),
            excerpts=excerpts(run),
            refused=refused(run),
        )
    )
    durable.write_bytes(output, page.encode())
    return found


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "code": _with_code,
        "name": without_folders,
        "number": lambda value: "–" if value is None else f"{value:,.0f}",
        "share": lambda value: "–" if value is None else f"{value:.1%}",
        "time": lambda seconds: duration(seconds / 3600) if seconds >= 60 else f"{seconds:.1f} s",
    }
    return environment


def _with_code(text: str) -> Markup:
    """Text whose `words in backticks` are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _markup(svg: str | None) -> Markup | None:
    return Markup(svg) if svg is not None else None


def _status(run: Run) -> tuple[str, str]:
    """(state, words) of the whole run."""
    if run.finished:
        return "done", "finished"
    figures = run.progress
    if figures.status in ("failed", "stopped"):
        return figures.status, f"generation {figures.status}"
    if figures.status in ("running", "waiting"):
        done = (figures.completed + figures.failed) / figures.total if figures.total else 0
        return "running", f"generating: {done:.0%}, {duration(figures.eta_hours)} left"
    stage, (done, planned) = next(
        (
            (name, counts)
            for name in ("prompts", "completions", "tokens", "validated")
            if (counts := run.shard_count(name))[0] < counts[1]
        ),
        ("corpus", (0, 1)),
    )
    return ("running" if done else "open"), f"next: {stage} ({done} of {planned} done)"


def _stages(run: Run) -> list[tuple[str, int, int]]:
    """(stage, finished, planned)."""
    stages = [(stage, *run.shard_count(stage)) for stage in ("prompts", "completions", "tokens", "validated")]
    return [
        ("target", int(run.target is not None), 1),
        *(stage for stage in stages if stage[2]),
        ("corpus", int(run.finished), 1),
    ]


def _tiles(run: Run, speed: Speed, busy: float) -> list[Tile]:
    figures = run.progress
    if run.corpus and run.corpus_is_current:
        totals, remark = run.corpus.manifest.totals, f"version {run.corpus.manifest.version}"
    else:
        statistics = [one.validated["statistics"] for one in run.datasets.values() if one.validated]
        totals = {
            "rows": sum(one["samples"] for one in statistics),
            "tokens": sum(one["tokens"] for one in statistics),
            "supervised_tokens": sum(one["supervised_tokens"] for one in statistics),
        }
        remark = "passed so far" if statistics else "none yet"
    supervised = totals["supervised_tokens"] / totals["tokens"] if totals["tokens"] else None
    output = figures.total_output_tokens
    live = figures.tokens_per_sec if figures.status == "running" else None
    rate = live or speed.tokens_per_second
    return [
        ("samples", f"{totals['rows']:,}", remark),
        ("tokens", short(totals["tokens"]), f"{totals['tokens']:,}"),
        ("supervised", short(totals["supervised_tokens"]), f"{supervised:.1%} of the tokens" if supervised is not None else "none yet"),
        ("cost", f"${figures.cost_usd:,.2f}", f"${figures.cost_usd / output * 1e6:,.2f} per million output tokens" if output and figures.cost_usd else "nothing was billed"),
        ("time at work", duration(busy / 3600), "with at least one job running"),
        ("tokens/s", short(rate) if rate else "–", "output, now" if live else "output, while generating"),
    ]  # fmt: skip


def _totals(ledgers: dict[str, Any]) -> dict[str, int | None]:
    names = [step.name for step in next(iter(ledgers.values())).steps]
    return {
        name: sum(counts) if None not in (counts := [ledger.count(name) for ledger in ledgers.values()]) else None
        for name in names
    }


def _measures(one: DatasetRun) -> dict[str, Any]:
    """Numbers of a dataset's card: percentiles and shares; None where nothing is known yet."""
    statistics = one.validated.get("statistics", {})
    samples, tokens = statistics.get("samples", 0), statistics.get("tokens", 0)
    supervised = statistics.get("supervised_tokens", 0)
    return {
        "lengths": {
            "prompt": _percentiles(one.prompt_lengths),
            "answer": _percentiles(one.answer_lengths),
            "sample": _percentiles(Lengths.of(statistics.get("lengths", {}))),
        },
        "supervised": supervised / tokens if tokens else None,
        "reasoning": statistics["reasoning_tokens"] / supervised if supervised else None,
        "thinking": statistics["thinking_samples"] / samples if samples else None,
        "multi_turn": statistics["multi_turn_samples"] / samples if samples else None,
        "truncated": statistics["flags"].get("truncated", 0) / samples if samples else None,
        "ids_origin": statistics.get("ids_origin") or dict(one.answers.ids_origin),
        "finish_reasons": dict(one.answers.finish_reasons),
        "flags": statistics.get("flags", {}),
        "outcomes": plots.outcome_shares(one),
    }


def _percentiles(lengths: Lengths) -> list[float | None]:
    """p50, p90, p99, longest, mean."""
    return [*(lengths.quantile(share) for share in (0.5, 0.9, 0.99, 1.0)), lengths.mean]


def _legend(run: Run) -> list[tuple[str, str]]:
    """(outcome, colour) of what occurs."""
    present = {outcome for one in run.datasets.values() for outcome in plots.outcome_shares(one)}
    return [(outcome, colour) for outcome, colour in plots.OUTCOME_COLOURS.items() if outcome in present]


def _endpoints(run: Run) -> list[tuple[tuple[str, str, str], TurnSums]]:
    """Endpoints by tokens, over all datasets; those beyond ENDPOINTS as one."""
    sums: dict[tuple[str, str, str], TurnSums] = {}
    for one in run.datasets.values():
        for key, turns in one.answers.endpoints.items():
            sums.setdefault(key, TurnSums()).add(turns)
    ordered = sorted(sums.items(), key=lambda item: (-item[1].tokens, item[0]))
    if len(ordered) > ENDPOINTS:
        rest = TurnSums()
        for _, turns in ordered[ENDPOINTS - 1 :]:
            rest.add(turns)
        ordered = [*ordered[: ENDPOINTS - 1], ((f"{len(ordered) - ENDPOINTS + 1} more", "", ""), rest)]
    return ordered


def _shared(facts: list[OriginFact]) -> list[tuple[str, OriginFact]]:
    """(whose, fact): a fact that is the same for several datasets once."""
    rows: list[tuple[list[str], OriginFact]] = []
    for fact in facts:
        same = next(
            (row for row in rows if not fact.mixed and row[1].name == fact.name and [*row[1].values] == [*fact.values]),
            None,
        )
        if same and fact.dataset:
            same[0].append(fact.dataset)
        else:
            rows.append(([fact.dataset or "run"], fact))
    return [(", ".join(names), fact) for names, fact in rows]
