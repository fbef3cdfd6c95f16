"""Snapshots of the corpus, taken before each merge, and the way back.

A backup is `backups/{time}-{version}/`: the parts and manifest of one version, and backup.json. Parts
are hard links where the file system allows (they never change, and removing one name leaves the
other), copies elsewhere; every byte is checked before a backup counts as good.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.stores import File, FileStore, TransferError
from scripts.lib.training import manifest, versions

RECORD = "backup.json"


@dataclass(slots=True)
class Snapshot:
    """What backup.json tells of a snapshot."""

    name: str
    version: str
    created: str  # UTC, ISO 8601
    rows: int
    tokens: int


def now() -> datetime:
    """The time that names a new backup."""
    return datetime.now(UTC)


def back_up(
    training: Path,
    backups: Path,
    keep: int,
    say: Callable[[str], None],
    clock: Callable[[], datetime] = now,
) -> Snapshot | None:
    """Snapshot the current corpus, verified, then remove the oldest backups beyond `keep`.

    A good backup of the same version is kept instead of making another. Returns None when there is
    no corpus. Raises UserError when the corpus is damaged, which must not replace good backups.
    """
    with versions.writer(training):
        directory = versions.current(training)
        if directory is None:
            say(f"backup: no corpus yet at {training}: nothing to save")
            return None
        versions.clear_remains(backups)
        whole = manifest.require_whole(directory)
        made = next((one for one in reversed(all_backups(backups)) if one.version == whole.version), None)
        if made:
            place(directory, backups / made.name, whole)
            say(f"backup: {made.name} holds version {made.version} already, verified")
        else:
            made = _snapshot(directory, whole, backups, clock())
            say(f"backup: {made.name}: {made.rows} samples, verified")
        # Rotation comes after a good backup is there, so the last good one is never removed.
        for old in [one for one in all_backups(backups) if one.name != made.name][: -(keep - 1) or None]:
            versions.remove(backups / old.name)
            say(f"backup: removed {old.name}, more than {keep} were there")
        for version in versions.prune(training, lambda version: has_good(backups, version)):
            say(f"backup: removed version {version}, a backup holds it")
        return made


def _snapshot(directory: Path, whole: manifest.Manifest, backups: Path, time: datetime) -> Snapshot:
    made = Snapshot(
        name=f"{time:%Y%m%dT%H%M%SZ}-{whole.version}",
        version=whole.version,
        created=time.isoformat(timespec="seconds"),
        rows=whole.totals["rows"],
        tokens=whole.totals["tokens"],
    )
    with versions.staging(backups / made.name) as folder:
        place(directory, folder, whole)
        durable.write_json(folder / RECORD, asdict(made))
        for problem in manifest.damaged_parts(folder, whole):
            raise UserError(f"{problem}: the backup could not be made")
    return made


def place(source: Path, destination: Path, whole: manifest.Manifest) -> None:
    """Put a version's files into `destination`, parts first, by hard link or copy.

    Parts that are there with the right bytes stay; each other one is put in place whole.
    """
    wanted = [part for part in whole.parts if manifest.part_damage(destination / part.file, part)]
    if os.stat(source).st_dev != os.stat(destination).st_dev:
        durable.require_free_space(destination, sum(part.bytes for part in wanted), "the copy of the corpus")
    for name in [*(part.file for part in wanted), manifest.MANIFEST]:
        with durable.replacing(destination / name) as temporary:
            durable.link_or_copy(source / name, temporary)


def all_backups(backups: Path) -> list[Snapshot]:
    """All backups that are complete, the oldest first."""
    records = [durable.read_json(path) for path in backups.glob(f"[!.]*/{RECORD}")]
    return sorted((Snapshot(**record) for record in records), key=lambda one: (one.created, one.name))


def has_good(backups: Path, version: str) -> bool:
    """Whether some backup holds a version, every byte of it."""
    return any(
        one.version == version
        and not manifest.damaged_parts(backups / one.name, manifest.read_manifest(backups / one.name))
        for one in all_backups(backups)
    )


def restore(training: Path, backups: Path, name: str, say: Callable[[str], None]) -> manifest.Manifest:
    """Make a backup the current corpus again, atomically. Raises UserError when it is unknown or damaged."""
    with versions.writer(training):
        known = [one.name for one in all_backups(backups)]
        if name not in known:
            raise UserError(f"{backups}: there is no backup {name!r}; there are: {', '.join(known) or 'none'}")
        source = backups / name
        whole = manifest.read_manifest(source)
        for problem in manifest.damaged_parts(source, whole):
            raise UserError(f"{problem}: the backup is damaged, nothing was changed: choose another one")
        directory = versions.corpora(training) / whole.version
        if directory.is_dir():
            place(source, directory, whole)
        else:
            with versions.staging(directory) as folder:
                place(source, folder, whole)
        versions.swap(training, directory)
        say(f"restore: {training} is {whole.version} again: {whole.totals['rows']} samples")
        return whole


def copy_elsewhere(backups: Path, made: Snapshot, store: FileStore, keep: int, say: Callable[[str], None]) -> None:
    """Copy a backup to another place, verified, and remove the oldest ones there beyond `keep`.

    Raises UserError when that fails: the backup here is good, but one place was not meant to be enough.
    """
    folder = backups / made.name
    whole = manifest.read_manifest(folder)
    digests = {part.file: part.sha256 for part in whole.parts}
    try:
        # The record comes last: a backup without one is not taken for complete.
        for name in [*manifest.files_of(whole), RECORD]:
            path = folder / name
            digest = digests.get(name) or durable.sha256_file(path)
            file = File(path, f"{made.name}/{name}", path.stat().st_size, digest)
            if not store.holds(file):
                store.put([file])
        there = names_elsewhere(store)
        for old in [name for name in there if name != made.name][: -(keep - 1) or None]:
            for key in sorted(store.keys(f"{old}/"), key=lambda key: not key.endswith(RECORD)):
                store.delete(key)
            say(f"backup: removed {old} from {store.url}, more than {keep} were there")
    except TransferError as error:
        raise UserError(f"backup.second_location: {error}: run again, or unset it") from None
    say(f"backup: {store.url} holds {made.name}, verified")


def names_elsewhere(store: FileStore) -> list[str]:
    """Names of the complete backups at another place, the oldest first."""
    return sorted(key.partition("/")[0] for key in store.keys("") if key.endswith(f"/{RECORD}"))


def fetch(store: FileStore, name: str, backups: Path, say: Callable[[str], None]) -> None:
    """Bring a backup from another place into `backups`, verified. Raises UserError when it isn't whole there."""
    if (backups / name / RECORD).is_file():
        return
    known = names_elsewhere(store)
    if name not in known:
        raise UserError(f"{store.url}: there is no backup {name!r}; there are: {', '.join(known) or 'none'}")
    try:
        with versions.staging(backups / name) as folder:
            store.get(f"{name}/{manifest.MANIFEST}", folder / manifest.MANIFEST)
            whole = manifest.read_manifest(folder)
            durable.require_free_space(folder, sum(part.bytes for part in whole.parts), "the backup")
            for part in whole.parts:
                store.get(f"{name}/{part.file}", folder / part.file)
            for problem in manifest.damaged_parts(folder, whole):
                raise UserError(f"{problem}: the backup at {store.url} is damaged: choose another one")
            store.get(f"{name}/{RECORD}", folder / RECORD)
    except TransferError as error:
        raise UserError(f"{error}: run again, or choose another backup") from None
    say(f"backup: fetched {name} from {store.url}")


def receipt(made: Snapshot | None) -> dict[str, Any]:
    """What a run keeps of a backup: its record, or that there was no corpus."""
    return {"backup": asdict(made)} if made else {"backup": None, "reason": "there was no corpus"}
