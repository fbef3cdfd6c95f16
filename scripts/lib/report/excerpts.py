"""A few samples and rejects of a run, to be read by people."""

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.lib.core.records import Sample, open_parquet
from scripts.lib.report.run import DatasetRun, Run
from scripts.lib.report.show import decoded_text, find_samples, heading, spans
from scripts.lib.target.model import Target, load_target

LONGEST = 1400  # characters of one span; of a longer one its start and end are shown
REJECTS = 3  # examples of each check


@dataclass(slots=True)
class Span:
    """A stretch of a sample: `supervised` is what the drafter learns, `cut` the characters left out in the middle."""

    text: str
    supervised: bool
    cut: int = 0
    rest: str = ""


@dataclass(slots=True)
class Excerpt:
    """One sample as text."""

    dataset: str
    heading: str
    spans: list[Span]


@dataclass(slots=True)
class RefusedSample:
    """One rejected sample: which check, and what it saw."""

    dataset: str
    check: str
    detail: str
    id: str


def excerpts(run: Run) -> list[Excerpt]:
    """The first sample that passed of every dataset; [] before there is one."""
    found: list[Excerpt] = []
    target: Target | None = None
    for one in run.datasets.values():
        sample = _first(one)
        if sample is not None and run.target:
            target = target or load_target(run.results.target)
            found.append(Excerpt(one.name, heading(sample), [_span(target, *span) for span in spans(sample)]))
    return found


def _first(one: DatasetRun) -> Sample | None:
    for path in one.shards["validated"]:
        for sample in find_samples([path], None, None, 0, 1):
            return sample
    return None


def _span(target: Target, mask: int, ids: list[int]) -> Span:
    text = decoded_text(target, ids)
    if len(text) <= LONGEST:
        return Span(text, bool(mask))
    head, tail = text[: LONGEST * 2 // 3], text[-LONGEST // 3 :]
    return Span(head, bool(mask), len(text) - len(head) - len(tail), tail)


def refused(run: Run) -> list[RefusedSample]:
    """The first rejects of every check and dataset."""
    return [found for one in run.datasets.values() for found in _refused(one)]


def _refused(one: DatasetRun) -> Iterator[RefusedSample]:
    wanted = {check: min(REJECTS, count) for check, count in one.validated.get("rejects", {}).items()}
    for path in one.shards["validated"]:
        rejects = path.with_suffix(".rejects.parquet")
        if not any(wanted.values()):
            return
        if not rejects.is_file():
            continue
        with open_parquet(rejects) as file:
            for batch in file.iter_batches(batch_size=4096, columns=["id", "check", "detail"]):
                for row in batch.to_pylist():
                    if wanted.get(row["check"], 0):
                        wanted[row["check"]] -= 1
                        yield RefusedSample(one.name, row["check"], row["detail"], row["id"])
