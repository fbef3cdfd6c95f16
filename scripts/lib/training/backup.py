"""Snapshots of the corpus, taken before each merge, and the way back.

A backup is `backups/{time}-{version}/`: the parts and manifest of one version, and backup.json. Parts are copies (with
shared blocks where the file system can), so that what happens to a file of the corpus doesn't happen to its backup;
hard links when the settings say so. Every byte is checked before a backup counts as good.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.stores import File, FileStore, TransferError
from scripts.lib.training import manifest, versions
from scripts.lib.training.succession import rotated

RECORD = "backup.json"
_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}")


@dataclass(slots=True)
class Snapshot:
    """What backup.json tells of a snapshot. `name` is also the folder's."""

    name: Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]
    version: manifest.Version
    created: str  # UTC, ISO 8601
    rows: int
    tokens: int


_SNAPSHOT = TypeAdapter(Snapshot)


def now() -> datetime:
    """The time that names a new backup."""
    return datetime.now(UTC)


def back_up(
    training: Path,
    backups: Path,
    keep: int,
    say: Callable[[str], None],
    clock: Callable[[], datetime] = now,
    hard_links: bool = False,
) -> Snapshot | None:
    """Snapshot the current corpus, verified, then remove the oldest backups beyond `keep` (see `succession`).

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
        for problem in unreadable(backups):
            say(f"backup: {problem}: left alone")
        made = next((one for one in reversed(all_backups(backups)) if one.version == whole.version), None)
        if made:
            place(directory, backups / made.name, whole, hard_links)
            _require_good(backups / made.name, whole)
            say(f"backup: {made.name} holds version {made.version} already, verified")
        else:
            made = _snapshot(directory, whole, backups, clock(), hard_links)
            say(f"backup: {made.name}: {made.rows} samples, verified")
        # Rotation comes after a good backup is there, so the last good one is never removed. Names of the future (of
        # a clock that was wrong, or made up) count for nothing: they would push out the real ones.
        today = f"{clock():%Y%m%dT%H%M%SZ}~"
        there = [
            (one.name, told)
            for one, told in with_manifests(backups)
            if one.name < today and not (backups / one.name).is_symlink()
        ]
        for name in rotated(there, made.name, keep):
            versions.remove(backups / name)
            say(f"backup: removed {name}, more than {keep} were there")
        for version in versions.prune(training, lambda version: has_good(backups, version)):
            say(f"backup: removed version {version}, a backup holds it")
        return made


def _snapshot(directory: Path, whole: manifest.Manifest, backups: Path, time: datetime, hard_links: bool) -> Snapshot:
    made = Snapshot(
        name=f"{time:%Y%m%dT%H%M%SZ}-{whole.version}",
        version=whole.version,
        created=time.isoformat(timespec="seconds"),
        rows=whole.totals["rows"],
        tokens=whole.totals["tokens"],
    )
    with versions.staging(backups / made.name) as folder:
        place(directory, folder, whole, hard_links)
        durable.write_json(folder / RECORD, asdict(made))
        _require_good(folder, whole)
    return made


def _require_good(folder: Path, whole: manifest.Manifest) -> None:
    for problem in manifest.damaged_parts(folder, whole):
        raise UserError(f"{problem}: what was written is not what is there: check the disk, then run again")


def place(source: Path, destination: Path, whole: manifest.Manifest, hard_links: bool = False) -> None:
    """Put a version's files into `destination`, parts first, as copies or as hard links.

    Parts that are there with the right bytes stay (as files of their own, unless links are wanted); each other one
    is put in place whole. Raises UserError when the disk has no room for the copies.
    """
    wanted = [
        part
        for part in whole.parts
        if manifest.part_damage(destination / part.file, part)
        or not (hard_links or _apart(source / part.file, destination / part.file))
    ]
    linked = hard_links and os.stat(source).st_dev == os.stat(destination).st_dev
    if wanted and not linked and not durable.can_reflink(source / wanted[0].file, destination):
        purpose = "the copy of the corpus" + (" (backup.hard_links: true needs none)" if not hard_links else "")
        durable.require_free_space(destination, sum(part.bytes for part in wanted), purpose)
    put = durable.link_or_copy if hard_links else durable.copy
    for name in [*(part.file for part in wanted), manifest.MANIFEST]:
        with durable.replacing(destination / name) as temporary:
            put((source / name).resolve(), temporary)  # a link to a link would lead elsewhere


def _apart(one: Path, other: Path) -> bool:
    return not os.path.samestat(one.stat(), other.stat())


def read_record(folder: Path) -> Snapshot:
    """backup.json of a backup. Raises UserError when it isn't one of ours, or that of another folder."""
    path = folder / RECORD
    record = manifest.read_as(_SNAPSHOT, path, "the record of a backup")
    if record.name != folder.name:
        raise UserError(f"{path}: is that of {record.name}: name the folder so again")
    return record


def _found(backups: Path) -> Iterator[tuple[Snapshot | None, str]]:
    """Every folder with a record: what it tells, or why it can't be read."""
    for path in sorted(backups.glob(f"[!.]*/{RECORD}")):
        try:
            yield read_record(path.parent), ""
        except UserError as error:
            yield None, str(error)


def all_backups(backups: Path) -> list[Snapshot]:
    """All backups that are complete, the oldest first."""
    return sorted((one for one, _ in _found(backups) if one), key=lambda one: one.name)  # which begins with the time


def unreadable(backups: Path) -> list[str]:
    """One line for each folder whose record can't be read; nothing is done to it."""
    return [problem for one, problem in _found(backups) if not one]


def with_manifests(backups: Path) -> list[tuple[Snapshot, manifest.Manifest]]:
    """All complete backups whose manifest can be read, the oldest first."""
    found = []
    for one in all_backups(backups):
        with contextlib.suppress(UserError):  # who restores or verifies it is told
            found.append((one, manifest.read_manifest(backups / one.name)))
    return found


def has_good(backups: Path, version: str) -> bool:
    """Whether some backup holds a version, every byte of it."""
    return any(
        one.version == version and not manifest.damages(backups / one.name, told)
        for one, told in with_manifests(backups)
    )


def restore(
    training: Path, backups: Path, name: str, say: Callable[[str], None], hard_links: bool = False
) -> manifest.Manifest:
    """Make a backup the current corpus again, atomically. Raises UserError when it is unknown or damaged."""
    versions.current(training)  # or something else is in its place
    with versions.writer(training):
        known = [one.name for one in all_backups(backups)]
        if name not in known:
            problems = [line for line in unreadable(backups) if f"/{name}/{RECORD}" in line]
            there = f"there is no backup {name!r}; there are: {', '.join(known) or 'none'}"
            raise UserError(problems[0] if name and problems else f"{backups}: {there}")
        source = backups / name
        whole = manifest.read_manifest(source)
        found = manifest.damages(source, whole)
        if whole.version != read_record(source).version:
            found.append(f"{source / manifest.MANIFEST}: is that of another version")
        for problem in found:
            raise UserError(f"{problem}: the backup is damaged, nothing was changed: choose another one")
        _bring_back(source, versions.corpora(training) / whole.version, whole, hard_links)
        versions.swap(training, versions.corpora(training) / whole.version)
        say(f"restore: {training} is {whole.version} again: {whole.totals['rows']} samples")
        return whole


def _bring_back(source: Path, directory: Path, whole: manifest.Manifest, hard_links: bool) -> None:
    if directory.is_symlink():
        raise UserError(f"{directory}: is a link, which leads elsewhere: remove it and run again")
    if directory.is_dir():
        place(source, directory, whole, hard_links)
        _require_good(directory, whole)
        return
    with versions.staging(directory) as folder:
        place(source, folder, whole, hard_links)
        _require_good(folder, whole)


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
        for old in rotated(_manifests_elsewhere(store), made.name, keep):
            for key in sorted(store.keys(f"{old}/"), key=lambda key: not key.endswith(RECORD)):
                store.delete(key)
            say(f"backup: removed {old} from {store.url}, more than {keep} were there")
    except TransferError as error:
        raise UserError(f"backup.second_location: {error}: run again, or unset it") from None
    say(f"backup: {store.url} holds {made.name}, verified")


def names_elsewhere(store: FileStore) -> list[str]:
    """Names of the complete backups at another place, the oldest first. Folders with other names are not ours."""
    folders = (key.removesuffix(f"/{RECORD}") for key in store.keys("") if key.endswith(f"/{RECORD}"))
    return sorted(folder for folder in folders if _NAME.fullmatch(folder))


def _manifests_elsewhere(store: FileStore) -> list[tuple[str, manifest.Manifest]]:
    """Of the complete backups there, the oldest first; one whose manifest can't be read is left alone."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for backup in names_elsewhere(store):
            store.get(f"{backup}/{manifest.MANIFEST}", Path(name) / manifest.MANIFEST)
            with contextlib.suppress(UserError):
                found.append((backup, manifest.read_manifest(Path(name))))
    return found


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
            store.get(f"{name}/{RECORD}", folder / RECORD)
            for problem in [*manifest.damages(folder, whole), *_wrong_record(folder, name, whole)]:
                raise UserError(f"{problem}: the backup at {store.url} is damaged: choose another one")
    except TransferError as error:
        raise UserError(f"{error}: run again, or choose another backup") from None
    say(f"backup: fetched {name} from {store.url}")


def _wrong_record(folder: Path, name: str, whole: manifest.Manifest) -> list[str]:
    record = manifest.read_as(_SNAPSHOT, folder / RECORD, "the record of a backup")
    same = (record.name, record.version) == (name, whole.version)
    return [] if same else [f"{name}/{RECORD}: is that of another backup"]


def receipt(made: Snapshot | None) -> dict[str, Any]:
    """What a run keeps of a backup: its record, or that there was no corpus."""
    return {"backup": asdict(made)} if made else {"backup": None, "reason": "there was no corpus"}
