"""What a corpus loses against the one that it follows, and which backups are therefore never rotated away."""

import itertools

from scripts.lib.training.manifest import Manifest

SHARE = 0.5  # of the samples: a corpus with fewer is no successor that anybody would expect


def losses(before: Manifest, after: Manifest) -> list[str]:
    """What of `before` is not in `after`, one phrase each; [] for a corpus that has grown or changed a little."""
    found = []
    for name, entry in before.datasets.items():
        rows = after.datasets[name]["rows"] if name in after.datasets else 0
        if entry["rows"] and not rows:
            found.append(f"the dataset {name} ({entry['rows']:,} samples) is gone")
    if _has_base(before) and not _has_base(after):
        rows = sum(entry["from_base"] for entry in before.datasets.values())
        found.append(f"its base ({rows:,} samples) is gone")
    old, new = before.totals["rows"], after.totals["rows"]
    if new < SHARE * old:
        found.append(f"{new:,} samples are left of {old:,}")
    return found


def _has_base(manifest: Manifest) -> bool:
    return any(one.kind == "base" for one in manifest.inputs)


def never_rotated(backups: list[tuple[str, Manifest]]) -> dict[str, str]:
    """Names of backups that stay whatever their age, with the reason. `backups`: the oldest first.

    Each that the next one is no successor of (nothing that came later holds its samples), and the largest.
    """
    kept = {}
    for (name, manifest), (following, after) in itertools.pairwise(backups):
        if lost := losses(manifest, after):
            kept[name] = f"{lost[0]} in {following}"
    if backups:
        largest = max(reversed(backups), key=lambda one: one[1].totals["rows"])[0]
        kept.setdefault(largest, "it is the largest")
    return kept


def rotated(backups: list[tuple[str, Manifest]], newest: str, keep: int) -> list[str]:
    """Names of the backups to remove so that about `keep` are left, `newest` among them."""
    others = [one for one in backups if one[0] != newest]
    kept = never_rotated([*others, *(one for one in backups if one[0] == newest)])  # whatever the clock says
    return [name for name, _ in others[: -(keep - 1) or None] if name not in kept]
