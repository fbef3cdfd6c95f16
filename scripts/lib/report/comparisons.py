"""Answer lengths against what they should be: a change of the mean is the first sign of a wrong template, limit or model.

A dataset is compared with itself in the corpus before, its shards and servers with each other, and datasets with
datasets.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from scripts.lib.report.answers import TurnSums
from scripts.lib.report.run import DatasetRun, Run
from scripts.lib.report.suspicion import LOOK, NOTE, WRONG, Suspicion, share_text
from scripts.lib.validated.lengths import Lengths

CHANGED = 1.6  # times longer or shorter than the dataset's answers were before
FAR = 5.0  # times longer or shorter than the median dataset's answers
UNEVEN = 1.5  # times longer or shorter than the same prompts get elsewhere in the run
DEVIATIONS = 5.0  # and that many standard errors away
FEW = 30  # turns or samples: below, means tell nothing
DOMINANT = 0.8  # share of the supervised tokens that one dataset gives


def compare(run: Run) -> Iterator[Suspicion]:
    """All findings about lengths."""
    for one in run.datasets.values():
        yield from _history(run, one)
    for one in run.datasets.values():
        yield from _shards(one)
    yield from _endpoints(run)
    yield from _between_datasets(run)


def times(value: float, reference: float) -> tuple[float, str]:
    """(ratio of at least 1, `9.1x shorter`)."""
    ratio = value / reference
    return (ratio, f"{ratio:.1f}x longer") if ratio >= 1 else (1 / ratio, f"{1 / ratio:.1f}x shorter")


def _history(run: Run, one: DatasetRun) -> Iterator[Suspicion]:
    """Against the same dataset in the corpus before."""
    now, before = one.mean_answer, changed(run, one)
    if now and before:
        mean, name = before
        _, words = times(now, mean)
        how = "fell" if now < mean else "rose"
        yield Suspicion(
            WRONG,
            one.name,
            f"The mean answer {how} from {mean:,.0f} to {now:,.0f} tokens: {words} than in {name}.",
            "Compare max_tokens, chat_template_kwargs (is thinking on?), the served model and sampling before training on it.",
        )


def changed(run: Run, one: DatasetRun) -> tuple[float, str] | None:
    """`earlier_mean`, when the mean answer now is far from it."""
    before = earlier_mean(run, one.name)
    if before and one.mean_answer and times(one.mean_answer, before[0])[0] > CHANGED:
        return before
    return None


def earlier_mean(run: Run, dataset: str) -> tuple[float, str] | None:
    """(mean answer, name of the version) of the newest earlier corpus that holds the dataset."""
    for version in reversed(run.earlier):
        mean = version.mean_answer(dataset)
        if mean:
            return mean, version.name
    return None


def _between_datasets(run: Run) -> Iterator[Suspicion]:
    means = {name: one.mean_answer for name, one in run.datasets.items() if one.mean_answer and one.data_class == "B"}
    if len(means) >= 3:
        for name, mean in means.items():
            middle = median(other for key, other in means.items() if key != name)
            ratio, words = times(mean, middle)
            if ratio > FAR:
                yield Suspicion(
                    LOOK,
                    name,
                    f"Its mean answer has {mean:,.0f} tokens, {words} than the other datasets' (median {middle:,.0f}).",
                    "Fine if its tasks are like that; otherwise look at its samples below.",
                )
    tokens = {
        name: one.validated["statistics"]["supervised_tokens"] for name, one in run.datasets.items() if one.validated
    }
    total = sum(tokens.values())
    for name, count in tokens.items():
        if len(tokens) > 1 and total and count > DOMINANT * total:
            yield Suspicion(
                NOTE,
                name,
                f"It gives {share_text(count, total)} of all supervised tokens.",
                "`weight` or `max_samples` would balance the mix.",
            )


def _shards(one: DatasetRun) -> Iterator[Suspicion]:
    """Shards are random samples of their dataset, so their means must agree: else something changed within the run."""
    parts = {shard: Lengths.of(counts["statistics"]["supervised_lengths"]) for shard, counts in one.validations.items()}
    for shard, lengths in parts.items():
        rest = Lengths()
        for other, more in parts.items():
            if other != shard:
                rest.merge(more)
        if min(lengths.rows, rest.rows) < FEW or not lengths.mean or not rest.mean:
            continue
        error = (lengths.deviation**2 / lengths.rows + rest.deviation**2 / rest.rows) ** 0.5
        ratio, words = times(lengths.mean, rest.mean)
        if ratio > UNEVEN and abs(lengths.mean - rest.mean) > DEVIATIONS * error:
            yield Suspicion(
                WRONG,
                one.name,
                f"Shard {shard} has answers of {lengths.mean:,.0f} tokens on average, {words} than its other shards ({rest.mean:,.0f}), "
                "though shards are random samples of one dataset.",
                "Something changed during the run: the server, its model or its template.",
            )


def _endpoints(run: Run) -> Iterator[Suspicion]:
    """Servers get the same mix of prompts; what they get by dataset is taken into account."""
    actual: dict[tuple[str, str, str], TurnSums] = {}
    expected: dict[tuple[str, str, str], float] = defaultdict(float)
    for one in run.datasets.values():
        for key, turns in one.answers.endpoints.items():
            actual.setdefault(key, TurnSums()).add(turns)
            rest_turns, rest_tokens = one.answers.all.turns - turns.turns, one.answers.all.tokens - turns.tokens
            expected[key] += turns.turns * (rest_tokens / rest_turns if rest_turns >= FEW else turns.mean)
    for key, turns in actual.items():
        if turns.turns < FEW or not expected[key] or not turns.tokens:
            continue
        mean = expected[key] / turns.turns
        ratio, words = times(turns.mean, mean)
        if ratio > UNEVEN:
            yield Suspicion(
                LOOK,
                " ".join(part for part in key[:2] if part),
                f"Its {turns.turns:,} answers have {turns.mean:,.0f} tokens on average, {words} than the other endpoints give on the "
                f"same datasets ({mean:,.0f}).",
                "Compare its model, template and limits with the others'. (Of a server that ended early only the short answers are here.)",
            )
