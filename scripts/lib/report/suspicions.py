"""What is suspicious about a run, in words, the worst first.

Thresholds are judgement, not law: they are few, stand at the top, and the page tells them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from scripts.lib.core.records import OUTCOMES
from scripts.lib.prompts.defects import NOT_USED
from scripts.lib.report.comparisons import CHANGED, DOMINANT, FAR, UNEVEN, compare
from scripts.lib.report.ledger import LossLedger, corpus_problems
from scripts.lib.report.origins import OriginFact, Stale
from scripts.lib.report.run import DatasetRun, Run
from scripts.lib.report.suspicion import LOOK, NOTE, WRONG, Suspicion, share_text, together

CASES = 3  # prompts: fewer are no share of anything
CUT_LOOK, CUT_WRONG = 0.05, 0.25  # share of answers that reached max_tokens
THOUGHTS = 0.01  # share of samples whose thoughts the target doesn't know as such
THOUGHT_LOOK, THOUGHT_WRONG = 0.02, 0.2  # share of answers that are nothing but a thought
LOST_LOOK, LOST_WRONG = 0.02, 0.2  # share of prompts that end without an answer
LOOPS = 0.01  # share of answers that end in a loop
SOURCE_LOSS = 0.3  # share of a source's rows that is not used
LONG_COLUMN = 50  # characters that a column which nobody reads has on average: more than labels have
CHECK = 0.05  # share of samples that one check refuses
DRIFT = 0.01  # share of reconstructed answers whose ids differ from the sampled ones
OTHER_LENGTH = (
    0.1  # share of reconstructed answers that are longer or shorter than the API counted, or lack their thought
)
NEARLY = 0.95  # of a budget

CHECKED = (
    f"sums that don't add up; failed shards; answers {CHANGED:g}x longer or shorter than in the corpus before, {FAR:g}x than in "
    f"other datasets, {UNEVEN:g}x than on other servers or in other shards of the run; over {CUT_LOOK:.0%} of answers cut at max_tokens, "
    f"{THOUGHT_LOOK:.0%} that are thought only, {LOST_LOOK:.0%} of prompts lost in generation, {LOOPS:.0%} loops, "
    f"{SOURCE_LOSS:.0%} of source rows unused, {THOUGHTS:.0%} with thoughts that the target doesn't know, {CHECK:.0%} of samples refused by one check; reconstructed ids; "
    "mixed models, engines, samplings, tokenizers; one dataset above "
    f"{DOMINANT:.0%} of the corpus."
)

_THOUGHT_FLAGS = {
    "thought_in_text": (
        "begin with what looks like a thought, which is text to the target",
        "Is the chat template the model's own? Thoughts that it doesn't know count as answers in all figures.",
    ),
    "reasoning_dropped": (
        "had a thought in the source that the target has no place for: it was left out",
        "Turn the model's thinking on (`model.chat_template_kwargs`) or choose a source without thoughts.",
    ),
}
_APART = ("repetition", "over_budget")  # of the outcomes without an answer: told in words of their own


def suspicions(
    run: Run, ledgers: dict[str, LossLedger], origins: list[OriginFact], stale: list[Stale]
) -> list[Suspicion]:
    """Everything suspicious, the worst first."""
    datasets = run.datasets.values()
    found = [
        *_sums(run, ledgers),
        *compare(run),
        *_origins(origins),
        *_progress(run),
    ]
    for one in datasets:
        found += [*_source(one), *_answers(one), *_validation(run, one)]
    found += [*_stale(run, stale), *_corpus(run)]
    return sorted(together(found), key=lambda finding: (WRONG, LOOK, NOTE).index(finding.level))


def _graded(share: float, look: float, wrong: float) -> str | None:
    return WRONG if share > wrong else LOOK if share > look else None


# --- the run as a whole ---


def _sums(run: Run, ledgers: dict[str, LossLedger]) -> Iterator[Suspicion]:
    for name, ledger in ledgers.items():
        for problem in ledger.problems:
            yield Suspicion(
                WRONG,
                name,
                f"The numbers don't add up: {problem}.",
                "Files of different runs lie side by side: delete what is older and run again.",
            )
    for problem in corpus_problems(run):
        yield Suspicion(
            WRONG, "corpus", f"{problem}.", "Check it with `verify_training`; `restore_training` brings a backup back."
        )


def _progress(run: Run) -> Iterator[Suspicion]:
    for name, figures in run.progress.datasets.items():
        if figures.status in ("failed", "stopped"):
            left = figures.total - figures.completed - figures.failed
            how = "failed" if figures.status == "failed" else "was stopped"
            yield Suspicion(
                WRONG if figures.status == "failed" else LOOK,
                name,
                f"Generation {how} with {left:,} of {figures.total:,} prompts left.",
                f"`results/logs/generate_completions/{name}/` tells why; the same command goes on.",
            )
    budget, spent = run.config.budget, run.progress
    if budget.cost and spent.cost_usd > NEARLY * budget.cost:
        text = f"${spent.cost_usd:,.2f} of ${budget.cost:,.2f} are spent."
        yield Suspicion(LOOK, "budget", text, "Raise `budget.cost` to have the rest answered.")
    tokens = spent.total_input_tokens + spent.total_output_tokens
    if budget.tokens and tokens > NEARLY * budget.tokens:
        text = f"{tokens:,} of {budget.tokens:,} tokens are used."
        yield Suspicion(LOOK, "budget", text, "Raise `budget.tokens` to have the rest answered.")


def _corpus(run: Run) -> Iterator[Suspicion]:
    if run.corpus is None:
        return
    if run.corpus_is_current:
        for note in run.corpus.manifest.notes:
            yield Suspicion(NOTE, "corpus", f"{note}.")
    else:
        version = run.corpus.manifest.version
        text = f"results/training (version {version}) is the corpus of an earlier run; this one isn't merged yet."
        yield Suspicion(NOTE, "corpus", text)


# --- stages ---


def _source(one: DatasetRun) -> Iterator[Suspicion]:
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
        yield Suspicion(
            LOOK,
            one.name,
            f"{share_text(sum(lost.values()), wanted)} of the source's rows became no prompt ({reasons}).",
            f"results/prompts/{one.name}/report.json has examples by file and row." if unfit else "",
        )
    yield from _columns(one.name, one.source)


def _columns(name: str, source: dict[str, Any]) -> Iterator[Suspicion]:
    """Texts that prompts may lack, and how the source's own answers begin. Reports of before have neither."""
    unused = source.get("unused_columns", {})
    long = [column for column, entry in unused.items() if entry["characters"] >= LONG_COLUMN * entry["rows"]]
    if long:
        yield Suspicion(
            NOTE,
            name,
            f"Columns with text that nobody reads: {', '.join(long[:5])}.",
            "If a prompt lacks one of them, name it in `fields`.",
        )
    for beginning, count in source.get("answers_begin_with", {}).items():
        if beginning.isspace() or beginning.startswith("<"):
            share = share_text(count, source["answered"])
            yield Suspicion(
                LOOK,
                name,
                f"{share} of the source's own conversations ({count:,}) have an answer that begins with {beginning!r}.",
                "The drafter learns to begin so; clean the source if the target doesn't.",
            )


def _answers(one: DatasetRun) -> Iterator[Suspicion]:
    """Outcomes, from the finished shards, or from progress while there are none."""
    outcomes = one.answers.outcomes or Counter(one.progress.outcomes)
    total = sum(outcomes.values())
    if not total:
        return

    def graded(
        count: int, look: float, wrong: float, kind: str, advice: str = "", more: str = ""
    ) -> Iterator[Suspicion]:
        level = _graded(count / total, look, wrong) if count >= CASES else None
        if level:
            share = share_text(count, total)
            text = f"{share} of the prompts ({count:,}) {kind}{more}."
            yield Suspicion(level, one.name, text, advice, f"{{}} of the prompts {kind}.", share)

    yield from graded(
        outcomes["length"], CUT_LOOK, CUT_WRONG, OUTCOMES["length"].words,
        "Raise the lane's `max_tokens`, or set `truncation` (retry, continue or drop).", f" ({one.max_tokens:,})",
    )  # fmt: skip
    yield from graded(
        outcomes["reasoning_only"], THOUGHT_LOOK, THOUGHT_WRONG, OUTCOMES["reasoning_only"].words,
        "Raise `max_tokens`: the thought uses it up.",
    )  # fmt: skip
    loops = outcomes["repetition"] + one.validated.get("rejects", {}).get("repetition", 0)
    advice = "Look at the sampling: greedy decoding and long outputs loop."
    yield from graded(loops, LOOPS, 10 * LOOPS, OUTCOMES["repetition"].words, advice)
    for outcome, kind in OUTCOMES.items():
        if kind.answered or outcome in _APART:
            continue
        reasons = one.answers.reasons.get(outcome, Counter()).most_common(1)
        why = f", mostly: {reasons[0][0]} ({reasons[0][1]:,})" if reasons else ""
        yield from graded(outcomes[outcome], LOST_LOOK, LOST_WRONG, kind.words, more=why)
    if outcomes["over_budget"]:
        text = f"{outcomes['over_budget']:,} prompts {OUTCOMES['over_budget'].words}."
        yield Suspicion(LOOK, one.name, text, "Raise it and run again: only these are asked.")
    unknown = outcomes.keys() - set(OUTCOMES)
    if unknown:
        yield Suspicion(WRONG, one.name, f"Unknown outcomes: {', '.join(sorted(unknown))}.")
    repeated = one.progress.retried
    if repeated > total:
        yield Suspicion(
            LOOK,
            one.name,
            f"{repeated:,} sends failed and were made again for {total:,} prompts.",
            "The servers are overloaded or unstable.",
        )


def _validation(run: Run, one: DatasetRun) -> Iterator[Suspicion]:
    counts = one.validated
    if not counts:
        return
    samples, rejected = counts["samples"], sum(counts["rejects"].values())
    if not counts["passed"]:
        yield Suspicion(WRONG, one.name, "Not one sample passed validation.", "Its rejects are in results/validated.")
    limit = run.config.validation.max_reject_rate
    if samples and rejected > limit * samples:
        worst = ", ".join(
            f"{check} {count:,}" for check, count in sorted(counts["rejects"].items(), key=lambda item: -item[1])[:3]
        )
        yield Suspicion(
            WRONG,
            one.name,
            f"{share_text(rejected, samples)} of its samples were refused ({worst}), more than max_reject_rate {limit:.0%}.",
            "The merge waits until this is mended.",
        )
    else:
        for check, count in counts["rejects"].items():
            if samples and count > CHECK * samples:
                yield Suspicion(
                    LOOK,
                    one.name,
                    f"{share_text(count, samples)} of its samples ({count:,}) were refused by the check {check}.",
                    "Examples are below.",
                )
    yield from _thoughts(one)
    yield from _ids(run, one)


def _thoughts(one: DatasetRun) -> Iterator[Suspicion]:
    """Thoughts that are text to the target, or that it had no place for: settings may be wrong, or names unknown."""
    flags, samples = one.validated["statistics"]["flags"], one.validated["passed"]
    for flag, told in _THOUGHT_FLAGS.items():
        if flags.get(flag, 0) > THOUGHTS * samples:
            share = share_text(flags[flag], samples)
            text, advice = told
            yield Suspicion(
                LOOK,
                one.name,
                f"{share} of its samples ({flags[flag]:,}) {text}.",
                advice,
                f"{{}} of its samples {text}.",
                share,
            )


def _ids(run: Run, one: DatasetRun) -> Iterator[Suspicion]:
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
    drift: Counter[str] = Counter()
    for other in run.datasets.values():
        drift.update(other.validated.get("reconstruction", {}))
    if drift["turns"]:
        text += f" Where both are known, {share_text(drift['drifted'], drift['turns'])} of answers get other ids."
    other_length = one.validated["statistics"]["flags"].get("length_mismatch", 0)
    if other_length:
        text += f" {share_text(other_length, rebuilt)} of them hold an answer of another length than the API counted."
    dropped = one.validated["statistics"]["flags"].get("reasoning_dropped", 0)
    if dropped:
        text += f" {share_text(dropped, rebuilt)} of them lack a thought that came with the answer: the target's template has none."
    drifts = drift["drifted"] > DRIFT * max(1, drift["turns"]) or max(other_length, dropped) > OTHER_LENGTH * rebuilt
    level = LOOK if exact or drifts else NOTE
    yield Suspicion(level, one.name, text, "`merge.mixed_ids_origin: false` refuses a mixture." if exact else "")


def _origins(origins: list[OriginFact]) -> Iterator[Suspicion]:
    for origin in origins:
        if origin.mixed and origin.must_agree:
            values = "; ".join(f"{value} ({', '.join(where)})" for value, where in origin.places())
            yield Suspicion(
                WRONG,
                origin.dataset or "run",
                f"{origin.name} differs within the run: {values}.",
                "Make the older shards anew.",
            )


def _stale(run: Run, stale: list[Stale]) -> Iterator[Suspicion]:
    for one in stale:
        many = f"{len(one.shards)} of {run.config.shards} shards"
        told = f"of {one.stage} were made with another setting than the config has now: {one.change}."
        advice = "Run again, or report with the config of the run."
        yield Suspicion(LOOK, one.dataset, f"{many} {told}", advice, f"{{}} {told}", many)
