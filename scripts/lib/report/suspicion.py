"""A suspicion: one sentence about a run that somebody should know."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WRONG, LOOK, NOTE = "wrong", "look", "note"


@dataclass(slots=True)
class Suspicion:
    """One thing that somebody should know. `text` is a sentence, `advice` what to do.

    Several datasets often have the same trouble. Suspicions with the same `common` are told in one sentence:
    `common`, its `{}` replaced by each dataset with its `share`.
    """

    level: str  # wrong | look | note
    where: str
    text: str
    advice: str = ""
    common: str = ""
    share: str = ""


def together(found: Iterable[Suspicion]) -> Iterator[Suspicion]:
    """Findings of one kind in several datasets as one, in the place of the first."""
    groups: dict[tuple[str, str], list[Suspicion]] = {}
    for number, finding in enumerate(found):
        groups.setdefault((finding.level, finding.common or str(number)), []).append(finding)
    for (level, common), same in groups.items():
        if len(same) == 1:
            yield same[0]
        else:
            shares = ", ".join(f"{finding.where} {finding.share}" for finding in same)
            yield Suspicion(level, f"{len(same)} datasets", common.replace("{}", shares), same[0].advice)


def share_text(count: int, total: int) -> str:
    share = count / total
    return f"{share:.1%}" if share >= 0.001 else f"{share:.2%}"
