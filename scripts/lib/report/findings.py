"""What is suspicious about a run, in words, the worst first.

Thresholds are judgement, not law: they are few, stand at the top, and the page tells them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from scripts.lib.defects import NOT_USED
from scripts.lib.records import OUTCOMES
from scripts.lib.report.answers import Turns
from scripts.lib.report.ledger import Ledger, corpus_problems
from scripts.lib.report.lengths import Lengths
from scripts.lib.report.origins import Origin, Stale
from scripts.lib.report.run import DatasetRun, Run

WRONG, LOOK, NOTE = "wrong", "look", "note"

CHANGED = 1.6  # times longer or shorter than the dataset's answers were before
FAR = 5.0  # times longer or shorter than the median dataset's answers
UNEVEN = 1.5  # times longer or shorter than the same prompts get elsewhere in the run
DEVIATIONS = 5.0  # and that many standard errors away
CASES = 3  # prompts: fewer are no share of anything
FEW = 30  # turns or samples: below, means tell nothing
CUT_LOOK, CUT_WRONG = 0.05, 0.25  # share of answers that reached max_tokens
THOUGHT_LOOK, THOUGHT_WRONG = 0.02, 0.2  # share of answers that are nothing but a thought
LOST_LOOK, LOST_WRONG = 0.02, 0.2  # share of prompts that end without an answer
LOOPS = 0.01  # share of answers that end in a loop
SOURCE_LOSS = 0.3  # share of a source's rows that is not used
CHECK = 0.05  # share of samples that one check refuses
DRIFT = 0.01  # share of reconstructed answers whose ids differ from the sampled ones
NEARLY = 0.95  # of a budget
DOMINANT = 0.8  # share of the supervised tokens that one dataset gives

CHECKED = (
    f"sums that don't add up; failed shards; answers {CHANGED:g}x longer or shorter than in the corpus before, {FAR:g}x than in "
    f"other datasets, {UNEVEN:g}x than on other servers or in other shards of the run; over {CUT_LOOK:.0%} of answers cut at max_tokens, "
    f"{THOUGHT_LOOK:.0%} that are thought only, {LOST_LOOK:.0%} of prompts lost in generation, {LOOPS:.0%} loops, "
    f"{SOURCE_LOSS:.0%} of source rows unused, {CHECK:.0%} of samples refused by one check; reconstructed ids; "
    "mixed models, engines, samplings, tokenizers; one dataset above "
    f"{DOMINANT:.0%} of the corpus."
)

_NO_ANSWER = {
    "empty": "came back empty",
    "content_filter": "were refused by the provider's filter",
    "unexpected_tool_call": "were tool calls though no tools were given",
    "template_error": "were refused by the chat template",
    "rejected": "were rejected by the server",
    "exhausted": "failed on every attempt",
    "prompt_too_long": "were too long to be answered",
}


@dataclass(slots=True)
class Finding:
    """One thing that somebody should know. `text` is a sentence, `advice` what to do."""

    level: str  # wrong | look | note
    where: str
    text: str
    advice: str = ""
    kind: str = ""  # of datasets that have the same trouble; they are told together
    share: str = ""


def findings(run: Run, ledgers: dict[str, Ledger], origins: list[Origin], stale: list[Stale]) -> list[Finding]:
    """Everything suspicious, the worst first."""
    datasets = run.datasets.values()
    found = [
        *_sums(run, ledgers),
        *(finding for one in datasets for finding in _history(run, one)),
        *(finding for one in datasets for finding in _shards(one)),
        *_endpoints(run),
        *_origins(origins),
        *_progress(run),
        *_between_datasets(run),
    ]
    for one in datasets:
        found += [*_source(one), *_answers(one), *_validation(run, one)]
    found += [*_stale(run, stale), *_corpus(run)]
    return sorted(_together(found), key=lambda finding: (WRONG, LOOK, NOTE).index(finding.level))


def _together(found: list[Finding]) -> Iterator[Finding]:
    """Findings of one kind in several datasets as one."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for number, finding in enumerate(found):
        groups.setdefault((finding.level, finding.kind or str(number)), []).append(finding)
    for (level, kind), same in groups.items():
        if len(same) == 1:
            yield same[0]
        else:
            shares = ", ".join(f"{finding.where} {finding.share}" for finding in same)
            yield Finding(level, f"{len(same)} datasets", f"{shares} of the prompts {kind}.", same[0].advice)


def times(value: float, reference: float) -> tuple[float, str]:
    """(ratio of at least 1, `9.1x shorter`)."""
    ratio = value / reference
    return (ratio, f"{ratio:.1f}x longer") if ratio >= 1 else (1 / ratio, f"{1 / ratio:.1f}x shorter")


def _share(count: int, total: int) -> str:
    share = count / total
    return f"{share:.1%}" if share >= 0.001 else f"{share:.2%}"


def _graded(share: float, look: float, wrong: float) -> str | None:
    return WRONG if share > wrong else LOOK if share > look else None


# --- the run as a whole ---


def _sums(run: Run, ledgers: dict[str, Ledger]) -> Iterator[Finding]:
    for name, ledger in ledgers.items():
        for problem in ledger.problems:
            yield Finding(
                WRONG,
                name,
                f"The numbers don't add up: {problem}.",
                "Files of different runs lie side by side: delete what is older and run again.",
            )
    for problem in corpus_problems(run):
        yield Finding(
            WRONG, "corpus", f"{problem}.", "Check it with `verify_training`; `restore_training` brings a backup back."
        )


def _progress(run: Run) -> Iterator[Finding]:
    for name, figures in run.progress.datasets.items():
        if figures.status in ("failed", "stopped"):
            left = figures.total - figures.completed - figures.failed
            how = "failed" if figures.status == "failed" else "was stopped"
            yield Finding(
                WRONG if figures.status == "failed" else LOOK,
                name,
                f"Generation {how} with {left:,} of {figures.total:,} prompts left.",
                f"`results/logs/generate_completions/{name}/` tells why; the same command goes on.",
            )
    budget, spent = run.config.budget, run.progress
    if budget.cost and spent.cost_usd > NEARLY * budget.cost:
        text = f"${spent.cost_usd:,.2f} of ${budget.cost:,.2f} are spent."
        yield Finding(LOOK, "budget", text, "Raise `budget.cost` to have the rest answered.")
    tokens = spent.total_input_tokens + spent.total_output_tokens
    if budget.tokens and tokens > NEARLY * budget.tokens:
        text = f"{tokens:,} of {budget.tokens:,} tokens are used."
        yield Finding(LOOK, "budget", text, "Raise `budget.tokens` to have the rest answered.")


def _corpus(run: Run) -> Iterator[Finding]:
    if run.corpus is None:
        return
    if run.corpus_is_current:
        for note in run.corpus.manifest.notes:
            yield Finding(NOTE, "corpus", f"{note}.")
    else:
        version = run.corpus.manifest.version
        text = f"results/training (version {version}) is the corpus of an earlier run; this one isn't merged yet."
        yield Finding(NOTE, "corpus", text)


# --- lengths: a change of the mean answer is the first sign of a wrong template, limit or model ---


def _history(run: Run, one: DatasetRun) -> Iterator[Finding]:
    """Against the same dataset in the corpus before."""
    if before := changed(run, one):
        mean, name = before
        _, words = times(one.mean_answer, mean)
        how = "fell" if one.mean_answer < mean else "rose"
        yield Finding(
            WRONG,
            one.name,
            f"The mean answer {how} from {mean:,.0f} to {one.mean_answer:,.0f} tokens: {words} than in {name}.",
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


def _between_datasets(run: Run) -> Iterator[Finding]:
    means = {name: one.mean_answer for name, one in run.datasets.items() if one.mean_answer and one.data_class == "B"}
    if len(means) >= 3:
        for name, mean in means.items():
            middle = median(other for key, other in means.items() if key != name)
            ratio, words = times(mean, middle)
            if ratio > FAR:
                yield Finding(
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
            yield Finding(
                NOTE,
                name,
                f"It gives {_share(count, total)} of all supervised tokens.",
                "`weight` or `max_samples` would balance the mix.",
            )


def _shards(one: DatasetRun) -> Iterator[Finding]:
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
            yield Finding(
                WRONG,
                one.name,
                f"Shard {shard} has answers of {lengths.mean:,.0f} tokens on average, {words} than its other shards ({rest.mean:,.0f}), "
                "though shards are random samples of one dataset.",
                "Something changed during the run: the server, its model or its template.",
            )


def _endpoints(run: Run) -> Iterator[Finding]:
    """Servers get the same mix of prompts; what they get by dataset is taken into account."""
    actual: dict[tuple[str, str, str], Turns] = {}
    expected: Counter[tuple[str, str, str]] = Counter()
    for one in run.datasets.values():
        for key, turns in one.answers.endpoints.items():
            actual.setdefault(key, Turns()).add(turns)
            rest_turns, rest_tokens = one.answers.all.turns - turns.turns, one.answers.all.tokens - turns.tokens
            expected[key] += turns.turns * (rest_tokens / rest_turns if rest_turns >= FEW else turns.mean)
    for key, turns in actual.items():
        if turns.turns < FEW or not expected[key] or not turns.tokens:
            continue
        mean = expected[key] / turns.turns
        ratio, words = times(turns.mean, mean)
        if ratio > UNEVEN:
            yield Finding(
                WRONG,
                " ".join(part for part in key[:2] if part),
                f"Its {turns.turns:,} answers have {turns.mean:,.0f} tokens on average, {words} than the other endpoints give on the "
                f"same datasets ({mean:,.0f}).",
                "Compare its model, template and limits with the others'.",
            )


# --- stages ---


def _source(one: DatasetRun) -> Iterator[Finding]:
    if not one.source:
        return
    rows = one.source["rows"]
    # What max_samples leaves out was asked for.
    wanted = rows - one.source["reasons"].get("not_selected", {}).get("count", 0)
    lost = {reason: entry["count"] for reason, entry in one.source["reasons"].items() if reason != "not_selected"}
    if wanted and sum(lost.values()) > SOURCE_LOSS * wanted:
        worst = sorted(lost, key=lambda reason: -lost[reason])[:3]
        reasons = ", ".join(f"{reason} {lost[reason]:,}" for reason in worst)
        unfit = any(reason not in NOT_USED for reason in worst)
        yield Finding(
            LOOK,
            one.name,
            f"{_share(sum(lost.values()), wanted)} of the source's rows became no prompt ({reasons}).",
            f"results/prompts/{one.name}/report.json has examples by file and row." if unfit else "",
        )


def _answers(one: DatasetRun) -> Iterator[Finding]:
    """Outcomes, from the finished shards, or from progress while there are none."""
    outcomes = one.answers.outcomes or Counter(one.progress.outcomes)
    total = sum(outcomes.values())
    if not total:
        return

    def graded(count: int, look: float, wrong: float, kind: str, advice: str = "", more: str = "") -> Iterator[Finding]:
        level = _graded(count / total, look, wrong) if count >= CASES else None
        if level:
            share = _share(count, total)
            text = f"{share} of the prompts ({count:,}) {kind}{more}."
            yield Finding(level, one.name, text, advice, kind, share)

    yield from graded(
        outcomes["length"], CUT_LOOK, CUT_WRONG, "have an answer that was cut at max_tokens",
        "Raise the lane's `max_tokens`, or set `truncation` (retry, continue or drop).", f" ({one.max_tokens:,})",
    )  # fmt: skip
    yield from graded(
        outcomes["reasoning_only"], THOUGHT_LOOK, THOUGHT_WRONG, "have a thought that never ended, and no answer",
        "Raise `max_tokens`: the thought uses it up.",
    )  # fmt: skip
    loops = outcomes["repetition"] + one.validated.get("rejects", {}).get("repetition", 0)
    advice = "Look at the sampling: greedy decoding and long outputs loop."
    yield from graded(loops, LOOPS, 10 * LOOPS, "ended in a loop", advice)
    for outcome, words in _NO_ANSWER.items():
        reasons = one.answers.reasons.get(outcome, Counter()).most_common(1)
        why = f", mostly: {reasons[0][0]} ({reasons[0][1]:,})" if reasons else ""
        yield from graded(outcomes[outcome], LOST_LOOK, LOST_WRONG, words, more=why)
    if outcomes["over_budget"]:
        text = f"{outcomes['over_budget']:,} prompts were not sent: the budget is used up."
        yield Finding(LOOK, one.name, text, "Raise it and run again: only these are asked.")
    unknown = outcomes.keys() - set(OUTCOMES)
    if unknown:
        yield Finding(WRONG, one.name, f"Unknown outcomes: {', '.join(sorted(unknown))}.")
    repeated = one.progress.retried
    if repeated > total:
        yield Finding(
            LOOK,
            one.name,
            f"{repeated:,} sends failed and were made again for {total:,} prompts.",
            "The servers are overloaded or unstable.",
        )


def _validation(run: Run, one: DatasetRun) -> Iterator[Finding]:
    counts = one.validated
    if not counts:
        return
    samples, rejected = counts["samples"], sum(counts["rejects"].values())
    if not counts["passed"]:
        yield Finding(WRONG, one.name, "Not one sample passed validation.", "Its rejects are in results/validated.")
    limit = run.config.validation.max_reject_rate
    if samples and rejected > limit * samples:
        worst = ", ".join(
            f"{check} {count:,}" for check, count in sorted(counts["rejects"].items(), key=lambda item: -item[1])[:3]
        )
        yield Finding(
            WRONG,
            one.name,
            f"{_share(rejected, samples)} of its samples were refused ({worst}), more than max_reject_rate {limit:.0%}.",
            "The merge waits until this is mended.",
        )
    else:
        for check, count in counts["rejects"].items():
            if samples and count > CHECK * samples:
                yield Finding(
                    LOOK,
                    one.name,
                    f"{_share(count, samples)} of its samples ({count:,}) were refused by the check {check}.",
                    "Examples are below.",
                )
    yield from _ids(run, one)


def _ids(run: Run, one: DatasetRun) -> Iterator[Finding]:
    """Ids that were put together from text are only nearly what the target sampled."""
    origin = one.validated["statistics"]["ids_origin"]
    rebuilt = origin.get("reconstructed", 0)
    if not rebuilt:
        return
    exact = sum(
        other.validated["statistics"]["ids_origin"].get("engine", 0)
        for other in run.datasets.values()
        if other.validated
    )
    text = f"The ids of {rebuilt:,} samples were reconstructed from text."
    if exact:
        text = f"The ids of {rebuilt:,} samples were reconstructed from text, and {exact:,} samples of the run have the engine's own: both are in one corpus."
    drift = Counter()
    for other in run.datasets.values():
        drift.update(other.validated.get("reconstruction", {}))
    if drift["turns"]:
        text += f" Where both are known, {_share(drift['drifted'], drift['turns'])} of answers get other ids."
    level = LOOK if exact or drift["drifted"] > DRIFT * max(1, drift["turns"]) else NOTE
    yield Finding(level, one.name, text, "`merge.mixed_ids_origin: false` refuses a mixture." if exact else "")


def _origins(origins: list[Origin]) -> Iterator[Finding]:
    for origin in origins:
        if origin.mixed and origin.must_agree:
            values = "; ".join(f"{value} ({', '.join(where)})" for value, where in origin.places())
            yield Finding(
                WRONG,
                origin.dataset or "run",
                f"{origin.name} differs within the run: {values}.",
                "Make the older shards anew.",
            )


def _stale(run: Run, stale: list[Stale]) -> Iterator[Finding]:
    for one in stale:
        many = f"{len(one.shards)} of {run.config.shards} shards" if len(one.shards) > 1 else f"Shard {one.shards[0]}"
        yield Finding(
            LOOK,
            one.dataset,
            f"{many} of {one.stage} were made with another setting than the config has now: {one.change}.",
            "Run again, or report with the config of the run.",
        )
