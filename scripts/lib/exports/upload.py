"""Finished files go to `upload.target` while the run goes on; nothing local ever waits for that or depends on it.

Only what is complete and durable here is looked at: stages rename their files into place. A ledger under
state/uploads/ keeps, per file, what was stored and how far an interrupted multipart upload got, so that
another pass sends only what is new. A failure is counted and tried again later.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Upload
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.locks import hold
from scripts.lib.core.paths import Results
from scripts.lib.core.provenance import digest
from scripts.lib.stores import File, FileStore, TransferError
from scripts.lib.training import manifest, versions

AT_ONCE = 4  # transfers
SCAN_SECONDS = 15.0
BACKOFF_CAP = 900.0
PATTERNS = {
    "completions": ["completions/*/*.parquet"],
    "validated": ["validated/*/*.parquet", "validated/*/*.json", "validated/summary.json"],
    "exports": ["exports/*/**/*"],
    "hidden_states": ["hidden_states/data/*/*"],
}


@dataclass(slots=True)
class Entry:
    """The ledger of one file. `size` and `modified` tell whether `sha256` is still the file's."""

    key: str
    size: int = -1
    modified: int = -1  # nanoseconds
    sha256: str = ""
    stored: bool = False
    attempts: int = 0
    next_attempt: float = 0.0  # seconds since 1970
    error: str = ""
    memory: dict[str, Any] | None = None


@dataclass(slots=True)
class UploadCounts:
    """How far uploads are: the content of state/uploads.json."""

    s3_uploaded: int = 0  # files that the target holds, verified
    s3_bytes: int = 0
    s3_failed: int = 0  # files whose last attempt failed
    errors: dict[str, str] | None = None


def plan(results: Path, stages: list[str]) -> Iterator[list[tuple[Path, str]]]:
    """Yield waves of `(file, key)`: files of one wave in any order, waves one after the other.

    A manifest comes in a later wave than its parts, so the target never names a part that it hasn't got.
    """
    for stage in stages:
        if stage == "training":
            directory = versions.current(Results(results).training)
            if directory is not None:
                parts = [part.file for part in manifest.read_manifest(directory).parts]
                prefix = f"training/{directory.name}"
                yield [(directory / name, f"{prefix}/{name}") for name in parts]
                yield [(directory / manifest.MANIFEST, f"{prefix}/{manifest.MANIFEST}")]
                # The one that says which version is current.
                yield [(directory / manifest.MANIFEST, f"training/{manifest.MANIFEST}")]
            continue
        paths = sorted({path for pattern in PATTERNS[stage] for path in results.glob(pattern)})
        yield [
            (path, str(path.relative_to(results)))
            for path in paths
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(results).parts)
        ]
        last = results / stage / manifest.MANIFEST
        if last.is_file():
            yield [(last, str(last.relative_to(results)))]


class Uploader:
    """Brings a results folder to a store, pass by pass. Several processes may work on one results folder."""

    def __init__(
        self,
        results: Path,
        settings: Upload,
        store: FileStore,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.results, self.settings, self.store, self.say, self.clock = results, settings, store, say, clock
        self.paths = Results(results)
        self.ledger = self.paths.state.uploads

    def once(self, hurry: bool = False) -> UploadCounts:
        """One pass over all finished files. With `hurry`, also those that are waiting for their next attempt.

        Failures are in the returned counts; only a UserError (bucket, credentials) is raised.
        """
        for wave in plan(self.results, list(self.settings.stages)):
            groups = [wave[at : at + self.store.batch] for at in range(0, len(wave), self.store.batch)]
            with ThreadPoolExecutor(AT_ONCE) as threads:
                done = list(threads.map(lambda group: self._put(group, hurry), groups))
            if not all(done):
                break  # what comes later relies on this
        counts = self.counts()
        durable.write_json(self.paths.state.upload_counts, asdict(counts))
        progress = self.paths.progress
        if progress.exists():  # generation jobs add these counts too, while there are any
            told = {"s3_uploaded": counts.s3_uploaded, "s3_bytes": counts.s3_bytes, "s3_failed": counts.s3_failed}
            durable.write_json(progress, {**durable.read_json(progress), **told})
        return counts

    def _put(self, group: list[tuple[Path, str]], hurry: bool) -> bool:
        """FileStore some files. Returns whether the store holds all of them now."""
        with self._locked([key for _, key in group]) as entries:
            files = []
            for (path, _), entry in zip(group, entries):
                try:
                    status = path.stat()
                    if (entry.size, entry.modified) != (status.st_size, status.st_mtime_ns):
                        entry.sha256 = durable.sha256_file(path)
                        entry.size, entry.modified = status.st_size, status.st_mtime_ns
                        entry.stored, entry.attempts, entry.next_attempt = False, 0, 0.0
                except FileNotFoundError:
                    continue  # its job is being run again: it will be back
                if not entry.stored and (hurry or self.clock() >= entry.next_attempt):
                    files.append((self._file(path, entry), entry))
            if files:
                self._attempt(files)
            return all(entry.stored for entry in entries)

    def _file(self, path: Path, entry: Entry) -> File:
        def save() -> None:
            entry.memory = file.memory
            durable.write_json(self._entry_path(entry.key), asdict(entry))

        file = File(path, entry.key, entry.size, entry.sha256, dict(entry.memory or {}), save)
        return file

    def _attempt(self, files: list[tuple[File, Entry]]) -> None:
        try:
            missing = [(file, entry) for file, entry in files if not self.store.holds(file)]
            if missing:
                self.store.put([file for file, _ in missing])
        except FileNotFoundError:
            return  # deleted here while it was read
        except TransferError as error:
            for file, entry in files:
                entry.memory, entry.error = file.memory, str(error)
                entry.attempts += 1
                entry.next_attempt = self.clock() + min(SCAN_SECONDS * 2**entry.attempts, BACKOFF_CAP)
            self.say(f"upload: {error}; tried again later")
            return
        for _, entry in files:
            entry.stored, entry.memory, entry.error = True, None, ""
            self.say(f"upload: {entry.key} ({entry.size / 1e6:.1f} MB)")

    def _entry_path(self, key: str) -> Path:
        return self.ledger / f"{digest([self.store.url, key])}.json"

    @contextmanager
    def _locked(self, keys: list[str]) -> Iterator[list[Entry]]:
        """The entries of some files, for this process and thread alone; written back at the end."""
        self.ledger.mkdir(parents=True, exist_ok=True)
        entries = []
        with ExitStack() as held:
            for key in sorted(keys):  # in one order everywhere, so that two processes never wait for each other
                held.enter_context(hold(self._entry_path(key).with_suffix(".lock")))
            for key in keys:
                path = self._entry_path(key)
                entries.append(Entry(**durable.read_json(path)) if path.exists() else Entry(key))
            before = [asdict(entry) for entry in entries]
            yield entries
            for entry, old in zip(entries, before):
                if asdict(entry) != old:
                    durable.write_json(self._entry_path(entry.key), asdict(entry))

    def counts(self) -> UploadCounts:
        """Add up the ledger, for files that this run's stages name now."""
        counts = UploadCounts(errors={})
        for wave in plan(self.results, list(self.settings.stages)):
            for _, key in wave:
                path = self._entry_path(key)
                if not path.exists():
                    continue
                entry = Entry(**durable.read_json(path))
                counts.s3_uploaded += entry.stored
                counts.s3_bytes += entry.size if entry.stored else 0
                if entry.error:
                    counts.s3_failed += 1
                    assert counts.errors is not None
                    counts.errors[key] = entry.error
        return counts

    def watch(self, process: int, pause: Callable[[float], None] = time.sleep) -> None:
        """Make pass after pass for as long as `process` lives, then a last one."""
        alive = True
        while alive:
            alive = Path(f"/proc/{process}").exists()
            try:
                self.once()
            except UserError as error:
                self.say(f"upload: {error}; tried again later")
            if alive:
                pause(SCAN_SECONDS)
