"""The drawings of the report, as SVG that takes its colours and fonts from the page (so it fits light, dark and print)."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from scripts.lib.core.records import OUTCOMES
from scripts.lib.core.units import short
from scripts.lib.report.comparisons import CHANGED, earlier_mean, times
from scripts.lib.report.run import DatasetRun, Run

# Stand-ins that become CSS variables of the page. Black would not do: SVG leaves the default colour out.
_COLOURS = {
    "ink": "#010101",
    "soft": "#020202",
    "line": "#030303",
    "prompt": "#040404",
    "answer": "#050505",
    "bad": "#060606",
    "ok": "#070707",
    "cut": "#080808",
    "thought": "#090909",
    "lost": "#0a0a0a",
    "idle": "#0b0b0b",
    "filter": "#0c0c0c",
    "loop": "#0d0d0d",
    "failed": "#0e0e0e",
    "limit": "#0f0f0f",
}
INK, SOFT, LINE = _COLOURS["ink"], _COLOURS["soft"], _COLOURS["line"]
BINS_PER_OCTAVE = 3
WIDE, HALF = 12.0, 5.6  # inches: texts come out as large as the page's in both

# Outcomes in the order of the bar.
OUTCOME_COLOURS = {name: outcome.drawn_as for name, outcome in OUTCOMES.items()} | {"unanswered": "line"}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "drafter-corpus",
    "font.size": 11,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.tick_params(length=0)
    return figure, axes


def _svg(figure: Figure, label: str) -> str:
    """The figure as an <svg> element that scales with the page; `label` is read out to those who can't see it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for name, colour in _COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # Only clip paths and markers are referred to; the ids of all other elements would occur in every figure.
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(
        r"font: ([\d.]+)px [^;\"]+|font-family: [^;\"]+;?",
        lambda found: f"font-size: {found[1]}px" if found[1] else "",
        text,
    )
    label = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    text = re.sub(
        r"<svg [^>]*?viewBox=\"([^\"]+)\"[^>]*>",
        rf'<svg viewBox="\1" role="img" aria-label="{label}">',
        text,
        count=1,
        flags=re.DOTALL,
    )
    return re.sub(r"\n\s*", "\n", text).strip()


def _token_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    octaves = np.log2(high / low)
    axes.xaxis.set_major_locator(LogLocator(base=4 if octaves > 6 else 2, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", which="major", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)


def _tokens(value: float) -> str:
    """256, 1k, 16k: powers of two as people say them."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def token_range(run: Run) -> tuple[float, float]:
    """Limits that fit the lengths of all datasets, so that their plots can be compared."""
    lengths = [part for one in run.datasets.values() for part in (one.prompt_lengths, one.answer_lengths) if part.rows]
    limits = [one.max_tokens for one in run.datasets.values() if one.max_tokens and one.answers.prompts]
    low = min((part.quantile(0.005) or 1 for part in lengths), default=1)
    high = max([*(part.quantile(1.0) or 1 for part in lengths), *limits], default=1024)
    return 2 ** np.floor(np.log2(max(1, low))), 2 ** np.ceil(np.log2(max(high, 4 * low) + 1))


def mean_answers(run: Run) -> str | None:
    """Mean answer of each dataset now, and in the corpus before; the line spans p10 to p90."""
    rows = [(one, mean) for one in run.datasets.values() if (mean := one.mean_answer)]
    if not rows:
        return None
    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _figure(WIDE, 0.8 + 0.42 * len(rows))
        values = [mean for _, mean in rows]
        for row, (one, mean) in enumerate(rows):
            lengths = one.supervised_lengths
            if lengths.rows:
                spread = [max(1.0, lengths.quantile(share) or 0) for share in (0.1, 0.9)]
                axes.plot(spread, [row, row], color=_COLOURS["answer"], alpha=0.25, linewidth=7, solid_capstyle="round")
                values += spread
            before = earlier_mean(run, one.name)
            label, colour = short(mean), _COLOURS["answer"]
            if before:
                ratio, words = times(mean, before[0])
                if ratio > CHANGED:
                    colour = _COLOURS["bad"]
                    label = f"{mean:,.0f}, was {before[0]:,.0f}: {words}"
                    axes.annotate(
                        "",
                        (mean, row),
                        (before[0], row),
                        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 4, "shrinkB": 5},
                    )
                axes.plot(
                    [before[0]],
                    [row],
                    "o",
                    markersize=8,
                    markerfacecolor="none",
                    markeredgecolor=colour,
                    markeredgewidth=1.6,
                )
                values.append(before[0])
            axes.plot([mean], [row], "o", markersize=9, color=colour)
            axes.annotate(
                label,
                (mean, row),
                (0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=10,
                color=colour,
                weight="bold",
            )
        axes.set_yticks(range(len(rows)), [one.name for one, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.75)
        _token_axis(axes, 2 ** np.floor(np.log2(max(1, min(values) * 0.8))), 2 ** np.ceil(np.log2(max(values) * 1.3)))
        axes.set_xlabel("tokens per answer")
        return _svg(
            figure,
            "Mean answer length of each dataset: " + ", ".join(f"{one.name} {mean:.0f}" for one, mean in rows),
        )


def lengths(one: DatasetRun, limits: tuple[float, float]) -> str | None:
    """Prompt and answer lengths of a dataset on a log axis, with the medians and max_tokens."""
    parts = [("prompt", one.prompt_lengths), ("answer", one.answer_lengths)]
    if not any(part.rows for _, part in parts):
        return None
    edges = 2 ** np.arange(np.log2(limits[0]), np.log2(limits[1]) + 1e-9, 1 / BINS_PER_OCTAVE)
    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _figure(HALF, 1.9)
        for name, part in parts:
            if part.rows:
                axes.stairs(part.binned(edges), edges, fill=True, color=_COLOURS[name], alpha=0.32, linewidth=0)
                axes.stairs(part.binned(edges), edges, color=_COLOURS[name], linewidth=1.4)
        axes.set_ylim(bottom=0)
        top = axes.get_ylim()[1] * 1.4
        axes.set_ylim(top=top)
        middles = [max(1, part.quantile(0.5) or 1) for _, part in parts]
        for (name, part), middle, other in zip(parts, middles, reversed(middles)):
            if part.rows:
                axes.plot([middle, middle], [0, top * 0.86], color=_COLOURS[name], linewidth=1, linestyle=(0, (3, 2)))
                # Each label on its outer side, so that close medians don't overprint.
                side = "right" if middle < other or (middle == other and name == "prompt") else "left"
                _beside(axes, middle, top * 0.86, side, f"{name} {middle:,}", name)
        if one.max_tokens:
            axes.axvline(one.max_tokens, color=_COLOURS["limit"], linewidth=1.4)
            side = "left" if one.max_tokens**2 < limits[0] * limits[1] else "right"
            _beside(axes, one.max_tokens, top, side, f"max_tokens {one.max_tokens:,}", "limit")
        axes.set_yticks([])
        _token_axis(axes, *limits)
        return _svg(figure, f"Histogram of prompt and answer lengths of {one.name}")


def _beside(axes: Axes, x: float, y: float, side: str, text: str, colour: str) -> None:
    """A text below `y`, beside the vertical line at `x`; `side` is the text's side that touches the line."""
    axes.annotate(
        text, (x, y), (4 if side == "left" else -4, 0), textcoords="offset points", ha=side, va="top",
        color=_COLOURS[colour], fontsize=9.5, weight="bold",
    )  # fmt: skip


def outcomes(run: Run) -> str | None:
    """What became of every prompt, as a share of its dataset's prompts."""
    rows = [(name, shares) for name, one in run.datasets.items() if (shares := outcome_shares(one))]
    if not rows:
        return None
    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _figure(WIDE, 0.3 + 0.36 * len(rows))
        for row, (_, shares) in enumerate(rows):
            start = 0.0
            for outcome, share in shares.items():
                axes.barh(
                    row,
                    share,
                    left=start,
                    height=0.62,
                    color=_COLOURS[OUTCOME_COLOURS.get(outcome, "lost")],
                    linewidth=0,
                )
                if share >= 0.045:
                    axes.text(
                        start + share / 2,
                        row,
                        f"{share:.0%}",
                        ha="center",
                        va="center",
                        fontsize=9.5,
                        color=_COLOURS["ink"],
                    )
                start += share
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        return _svg(figure, "Outcomes of prompts: " + "; ".join(f"{name} {_words(shares)}" for name, shares in rows))


def _words(shares: dict[str, float]) -> str:
    return ", ".join(f"{outcome} {share:.1%}" for outcome, share in shares.items())


def outcome_shares(one: DatasetRun) -> dict[str, float]:
    """Share of the prompts by outcome, in the order of drawing; {} before the first outcome."""
    counts = dict(one.answers.outcomes) if len(one.answers.outcomes) else dict(one.progress.outcomes)
    total = max(one.prompt_rows, sum(counts.values()))
    if not sum(counts.values()):
        return {}
    counts["unanswered"] = total - sum(counts.values())
    order: Sequence[str] = [*OUTCOME_COLOURS, *sorted(counts.keys() - OUTCOME_COLOURS.keys())]
    return {outcome: counts[outcome] / total for outcome in order if counts.get(outcome)}
