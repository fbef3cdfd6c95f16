"""Finished files go to `upload.target` while the run goes on; no job ever waits for that or depends on it.

Only what is complete and durable here is looked at: stages rename their files into place. A ledger under
state/uploads/ keeps, per file, what was stored and how far an interrupted multipart upload got, so that
another pass sends only what is new. A failure is counted and tried again later; when the run ends, nothing waits.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
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
LAST_PASSES = 3  # when the run has ended, for what another attempt may cure
LAST_PAUSE = 5.0  # seconds between them
TOLD = 20  # errors of single files that the counts keep
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
    s3_failed: int = 0  # files whose last attempt failed, or that were not tried since the target refuses everything
    planned: int = 0  # files that are finished here
    errors: dict[str, str] = field(default_factory=dict)  # of the first TOLD files that failed
    reasons: dict[str, int] = field(default_factory=dict)  # of all that failed, the most first

    @property
    def missing(self) -> int:
        return self.planned - self.s3_uploaded

    def line(self, target: str) -> str:
        """How it ended, for people."""
        if not self.missing:
            return f"{target}: {self.s3_uploaded} files, {self.s3_bytes} bytes, verified"
        why, *others = self.reasons or ["they come after files that failed"]
        more = f" (and {len(others)} other reasons)" if others else ""
        return f"{self.missing} of {self.planned} files are not at {target}: {why.removeprefix(f'{target}: ')}{more}"


Waves = list[list[tuple[Path, str]]]


def plan(results: Path, stages: list[str]) -> Iterator[Waves]:
    """Yield for each stage its waves of `(file, key)`: files of one wave in any order, waves one after the other.

    A manifest comes in a later wave than its parts, so the target never names a part that it hasn't got. Stages don't
    wait for each other. Raises UserError for a corpus whose manifest can't be read.
    """
    for stage in stages:
        yield _corpus(results) if stage == "training" else _stage(results, stage)


def _corpus(results: Path) -> Waves:
    directory = versions.current(Results(results).training)
    if directory is None:
        return []
    parts = [part.file for part in manifest.read_manifest(directory).parts]
    prefix = f"training/{directory.name}"
    return [
        [(directory / name, f"{prefix}/{name}") for name in parts],
        [(directory / manifest.MANIFEST, f"{prefix}/{manifest.MANIFEST}")],
        # The one that says which version is current.
        [(directory / manifest.MANIFEST, f"training/{manifest.MANIFEST}")],
    ]


def _stage(results: Path, stage: str) -> Waves:
    paths = sorted({path for pattern in PATTERNS[stage] for path in results.glob(pattern)})
    waves = [
        [
            (path, str(path.relative_to(results)))
            for path in paths
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(results).parts)
        ]
    ]
    last = results / stage / manifest.MANIFEST
    return [*waves, [(last, str(last.relative_to(results)))]] if last.is_file() else waves


class Uploader:
    """Brings a results folder to a store, pass by pass. Several processes may work on one results folder."""

    def __init__(
        self,
        results: Path,
        settings: Upload,
        open_store: Callable[[], FileStore],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`open_store` is called again whenever the target refused what was asked: credentials may be new by then."""
        assert settings.target is not None
        self.results, self.settings, self.say, self.clock = results, settings, say, clock
        self.url = settings.target.rstrip("/")
        self.paths = Results(results)
        self.ledger = self.paths.state.uploads
        self._open_store = open_store
        self._refused = ""  # why the target takes nothing at all
        self._unplanned = ""  # why a stage's files are not known

    def once(self, hurry: bool = False) -> UploadCounts:
        """One pass over all finished files. With `hurry`, also those that are waiting for their next attempt.

        All failures are in the returned counts, which are written to state/uploads.json and progress.json.
        """
        self._pass(hurry)
        if self._refused:  # once more with what the environment and its files say now
            self._pass(hurry)
        if self._refused:
            self.say(f"upload: {self._refused}; tried again later")
        return self._record()

    def _pass(self, hurry: bool) -> None:
        self._refused = ""
        try:
            store = self._open_store()
            for waves in self._plan():
                for wave in waves:
                    if not self._send(store, wave, hurry):
                        break  # what comes later in this stage relies on it
        except UserError as error:
            self._refused = str(error)

    def _plan(self) -> Iterator[Waves]:
        """What can be planned: a damaged corpus holds up nothing else."""
        self._unplanned = ""
        for stage in self.settings.stages:
            try:
                yield from plan(self.results, [stage])
            except UserError as error:
                self._unplanned = str(error)

    def _send(self, store: FileStore, wave: list[tuple[Path, str]], hurry: bool) -> bool:
        """Store the files of a wave. Returns whether the store holds all of them now."""
        groups = [wave[at : at + store.batch] for at in range(0, len(wave), store.batch)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return all(list(threads.map(lambda group: self._put(store, group, hurry), groups)))

    def _record(self) -> UploadCounts:
        counts = self.counts()
        durable.write_json(self.paths.state.upload_counts, asdict(counts))
        progress = self.paths.progress
        if progress.exists():  # generation jobs add these counts too, while there are any
            told = {"s3_uploaded": counts.s3_uploaded, "s3_bytes": counts.s3_bytes, "s3_failed": counts.s3_failed}
            self.paths.state.progress_lock.parent.mkdir(parents=True, exist_ok=True)
            with hold(self.paths.state.progress_lock):
                durable.write_json(progress, {**durable.read_json(progress), **told})
        return counts

    def _put(self, store: FileStore, group: list[tuple[Path, str]], hurry: bool) -> bool:
        """Store some files. Returns whether the store holds all of them now."""
        if self._refused:
            return False
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
                except OSError as error:
                    entry.error = f"{path}: {error.strerror}"
                    continue
                if not entry.stored and (hurry or self.clock() >= entry.next_attempt):
                    files.append((self._file(path, entry), entry))
            if files:
                self._attempt(store, files)
            return all(entry.stored for entry in entries)

    def _file(self, path: Path, entry: Entry) -> File:
        def save() -> None:
            entry.memory = file.memory
            durable.write_json(self._entry_path(entry.key), asdict(entry))

        file = File(path, entry.key, entry.size, entry.sha256, dict(entry.memory or {}), save)
        return file

    def _attempt(self, store: FileStore, files: list[tuple[File, Entry]]) -> None:
        try:
            missing = [(file, entry) for file, entry in files if not store.holds(file)]
            if missing:
                store.put([file for file, _ in missing])
        except FileNotFoundError:
            return  # deleted here while it was read
        except UserError as error:
            self._refused = str(error)
            for _, entry in files:
                entry.error = str(error)
            return
        except (TransferError, OSError) as error:
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
        place = [self.url, self.settings.endpoint_url] if self.settings.endpoint_url else [self.url]
        return self.ledger / f"{digest([*place, key])}.json"

    @contextmanager
    def _locked(self, keys: list[str]) -> Iterator[list[Entry]]:
        """The entries of some files, for this process and thread alone; written back at the end."""
        self.ledger.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            for key in sorted(keys):  # in one order everywhere, so that two processes never wait for each other
                held.enter_context(hold(self._entry_path(key).with_suffix(".lock")))
            entries = [self._entry(key) for key in keys]
            before = [asdict(entry) for entry in entries]
            yield entries
            for entry, old in zip(entries, before):
                if asdict(entry) != old:
                    durable.write_json(self._entry_path(entry.key), asdict(entry))

    def _entry(self, key: str) -> Entry:
        """The ledger's entry; a new one where there is none or it can't be read: the store is asked then."""
        path = self._entry_path(key)
        try:
            return Entry(**durable.read_json(path)) if path.exists() else Entry(key)
        except (UserError, TypeError):
            return Entry(key)

    def counts(self) -> UploadCounts:
        """Add up the ledger, for files that this run's stages name now."""
        counts = UploadCounts()
        reasons: Counter[str] = Counter()
        keys = [key for waves in self._plan() for wave in waves for _, key in wave]
        for key in keys:
            entry = self._entry(key)
            counts.planned += 1
            counts.s3_uploaded += entry.stored
            counts.s3_bytes += entry.size if entry.stored else 0
            if not entry.stored and (why := self._refused or entry.error):
                counts.s3_failed += 1
                reasons[why] += 1
                if len(counts.errors) < TOLD:
                    counts.errors[key] = why
        if self._unplanned:
            counts.planned += 1
            counts.s3_failed += 1
            reasons[self._unplanned] += 1
        counts.reasons = dict(reasons.most_common(TOLD))
        return counts

    def finish(self, pause: Callable[[float], None] = time.sleep) -> UploadCounts:
        """The last passes: what was waiting for its next attempt gets it now, and some more of them."""
        for following in reversed(range(LAST_PASSES)):
            counts = self.once(hurry=True)
            if not counts.missing or self._refused or not following:
                break
            pause(LAST_PAUSE)
        return counts

    def watch(self, process: int, pause: Callable[[float], None] = time.sleep) -> UploadCounts:
        """Make pass after pass for as long as `process` lives, then the last ones."""
        while _lives(process):
            try:
                self.once()
            except OSError as error:  # of this side, such as a full disk
                self.say(f"upload: {error}; tried again later")
            pause(SCAN_SECONDS)
        return self.finish(pause)


def _lives(process: int) -> bool:
    """Whether a process runs, and isn't one that only waits to be collected."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
