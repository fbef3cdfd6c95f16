"""The whole extraction: what is there, what is missing, one pass per capture, and the manifest."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import durable, locks
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import code_version
from scripts.lib.hidden_states.capture import Pass, prepare
from scripts.lib.hidden_states.choice import Chosen, choose, rows
from scripts.lib.hidden_states.plan import DTYPE, NUMBER_BYTES, Capture, CapturePlan, make_plan, size_line
from scripts.lib.hidden_states.store import StateFiles, Stored, file_name
from scripts.lib.target.model import Target, load_target
from scripts.lib.training.reader import Corpus

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_CHECKED_AHEAD = 32  # files that are read at once to see whether they are whole


def extract(
    config: Config, training: Path, target_dir: Path, folder: Path, state: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Bring `folder` in line with the configuration and the corpus. Returns the manifest.

    Nothing that is there and whole is asked again. Raises UserError when it can't be done, before anything is sent
    where that can be known.
    """
    plan, corpus, target = make_plan(config), Corpus(training), load_target(target_dir)
    corpus.require_tokenizer(target, "ask the target that made it")
    chosen = choose(corpus, config.hidden_states)
    say(size_line(plan, len(chosen.tokens), chosen.total))
    if not chosen.tokens:
        raise UserError(f"{training}: none of its samples is chosen: raise hidden_states.fraction")
    folder.mkdir(parents=True, exist_ok=True)
    with locks.hold(folder / ".lock", wait=locks.PATIENCE, what=str(folder)):
        # The manifest stands for a whole folder, so it goes first and comes back last.
        (folder / MANIFEST).unlink(missing_ok=True)
        one = Extraction(config, plan, corpus, target_dir, target, chosen, StateFiles(folder, plan), state, say)
        one.look()
        one.capture()
        manifest = one.manifest()
        durable.write_json(folder / MANIFEST, manifest)
        one.store.clear_parts(keep={file_name(sample) for sample in one.failed})
    totals = manifest["totals"]
    say(
        f"done: {totals['samples']} samples, {totals['tokens']:,} tokens, {totals['bytes'] / 1e9:.2f} GB"
        + (f"; {totals['failed']} samples failed, see {folder / MANIFEST}" if totals["failed"] else "")
    )
    return manifest


def receipt(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run keeps of an extraction."""
    return {**manifest["totals"], "manifest": durable.sha256_file(folder / MANIFEST)}


@dataclass
class Extraction:
    """The samples of one folder: which are there, which are to be captured, which failed. All by sample id."""

    config: Config
    plan: CapturePlan
    corpus: Corpus
    target_dir: Path
    target: Target
    chosen: Chosen
    store: StateFiles
    state: Path
    say: Callable[[str], None]
    found: dict[str, Stored] = field(default_factory=dict)  # finished files
    parts: dict[str, set[str]] = field(default_factory=dict)  # tensors of unfinished ones
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)  # (capture, reason)

    def look(self) -> None:
        """Set aside what is not chosen, and find out what is there and whole."""
        aside = self.store.tidy({file_name(sample) for sample in self.chosen.tokens})
        if aside:
            self.say(f"{aside} files of samples that are not chosen now were set aside in {self.store.unused}")
        stream = rows(self.corpus, self.chosen.tokens)
        with ThreadPoolExecutor(4) as threads:
            while batch := list(itertools.islice(stream, _CHECKED_AHEAD)):
                for row, stored in zip(batch, threads.map(self.store.find, batch)):
                    if stored:
                        self.found[row.id] = stored
                left = [row for row in batch if row.id not in self.found]
                for row, states in zip(left, threads.map(self.store.part, left)):
                    if states:
                        self.parts[row.id] = set(states)
        self.say(
            f"{len(self.found)} of {len(self.chosen.tokens)} samples are there and whole, {len(self.parts)} in part"
        )

    def _missing(self, capture: Capture) -> dict[str, int]:
        """Tokens of the samples that lack a capture."""
        return {
            sample: tokens
            for sample, tokens in self.chosen.tokens.items()
            if sample not in self.found and capture.tensor not in self.parts.get(sample, ())
        }

    def _require_space(self) -> None:
        captures = self.plan.captures
        needed = sum(
            self.plan.token_bytes * tokens
            - NUMBER_BYTES * tokens * sum(c.width for c in captures if c.tensor in self.parts.get(sample, ()))
            for sample, tokens in self.chosen.tokens.items()
            if sample not in self.found
        )
        # A file and the part that it replaces are there at once, for each request in flight.
        in_flight = self.config.hidden_states.concurrency if needed else 0
        spare = in_flight * self.plan.token_bytes * self.chosen.longest
        durable.require_free_space(self.store.folder, needed + spare, "hidden states")

    def capture(self) -> None:
        """Run the passes that are needed. Raises UserError when no sample could be captured."""
        self._require_space()
        missing = {capture.name: self._missing(capture) for capture in self.plan.captures}
        # All servers are looked at before the first request.
        configs = {c.name: prepare(self.config, c) for c in self.plan.captures if missing[c.name]}
        for capture in self.plan.captures:
            wanted = {sample: tokens for sample, tokens in missing[capture.name].items() if sample not in self.failed}
            if wanted:
                self._run(capture, configs[capture.name], wanted)
        lost = [sample for sample in self.chosen.tokens if sample not in self.found and sample not in self.failed]
        if lost:
            raise UserError(
                f"{self.store.parts}: parts of {len(lost)} samples vanished meanwhile, as that of {lost[0]}: run again"
            )
        if not self.found:
            sample, (name, reason) = next(iter(self.failed.items()))
            raise UserError(f"no sample could be captured ({len(self.failed)} failed); {name} of {sample}: {reason}")

    def _run(self, capture: Capture, config: Config, wanted: dict[str, int]) -> None:
        self.say(f"capturing {capture.name} of {len(wanted)} samples, {sum(wanted.values()):,} tokens")
        corpus_rows = partial(rows, self.corpus)
        one = Pass(config, self.target_dir, self.target, self.state, capture, self.store, corpus_rows, wanted, self.say)
        one.run()
        self.found.update(one.got.stored)
        self.failed |= {sample: (capture.name, reason) for sample, reason in one.got.failed.items()}

    def manifest(self) -> dict[str, Any]:
        """The ledger of the folder. Holds no time: equal inputs and numbers, equal bytes.

        `chosen` = `samples` + `failed`; files are in the order of the corpus.
        """
        files = [self.found[sample] for sample in self.chosen.tokens if sample in self.found]
        launch = self.config.engine.launch.model_dump(mode="json", exclude={"env"})
        flags = {capture.name: capture.flags for capture in self.plan.captures}
        return {
            "schema_version": SCHEMA_VERSION,
            "method": self.plan.method,
            "tensors": {
                "input_ids": {"dtype": "int64", "shape": ["tokens"]},
                "loss_mask": {"dtype": "int64", "shape": ["tokens"]},
                **{
                    c.tensor: {"dtype": DTYPE, "shape": ["tokens", c.width], "holds": c.name}
                    for c in self.plan.captures
                },
            },
            "layers": {
                "hidden_states": list(self.plan.layers),
                "outputs_of": [layer - 1 for layer in self.plan.layers],
                "of": self.plan.shape.layers,
                "hidden_size": self.plan.shape.hidden_size,
                "last": "after the final norm" if len(self.plan.captures) > 1 else None,
            },
            "target": self.target.provenance(),
            "engine": {
                "kind": self.config.engine.kind,
                "versions": sorted({file.engine for file in files}),
                "launch": launch,
                "flags": flags,
            },
            "corpus": {
                "version": self.corpus.manifest.version,
                "manifest": durable.sha256_file(self.corpus.directory / "manifest.json"),
            },
            "settings": stage_settings(self.config, "hidden_states")["hidden_states"],
            "totals": {
                "chosen": len(self.chosen.tokens),
                "samples": len(files),
                "failed": len(self.failed),
                "tokens": sum(file.tokens for file in files),
                "bytes": sum(file.bytes for file in files),
            },
            "failed": [
                {"id": sample, "capture": self.failed[sample][0], "reason": self.failed[sample][1]}
                for sample in self.chosen.tokens
                if sample in self.failed
            ],
            "files": [asdict(file) for file in files],
            "code": code_version(),
        }
