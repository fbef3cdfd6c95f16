"""The whole extraction: what is there, what is missing, one pass per capture, and the manifest."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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
from scripts.lib.hidden_states.plan import DTYPE, NUMBER_BYTES, CapturePlan, make_plan, size_line
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
        store = StateFiles(folder, plan)
        aside = store.tidy({file_name(id) for id in chosen.tokens})
        if aside:
            say(f"{aside} files of samples that are not chosen now were set aside in {store.unused}")
        found, partial_tensors = _look(store, corpus, chosen)
        say(f"{len(found)} of {len(chosen.tokens)} samples are there and whole, {len(partial_tensors)} in part")
        failed = _capture(config, plan, corpus, target_dir, target, store, state, chosen, found, partial_tensors, say)
        if not found:
            id, (capture, reason) = next(iter(failed.items()))
            raise UserError(f"no sample could be captured ({len(failed)} failed); {capture} of {id}: {reason}")
        manifest = _manifest(config, plan, corpus, target, chosen, found, failed)
        durable.write_json(folder / MANIFEST, manifest)
        store.clear_parts(keep={file_name(id) for id in failed})
    totals = manifest["totals"]
    say(
        f"done: {totals['samples']} samples, {totals['tokens']:,} tokens, {totals['bytes'] / 1e9:.2f} GB"
        + (f"; {totals['failed']} samples failed, see {folder / MANIFEST}" if failed else "")
    )
    return manifest


def receipt(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run keeps of an extraction."""
    return {**manifest["totals"], "manifest": durable.sha256_file(folder / MANIFEST)}


def _look(store: StateFiles, corpus: Corpus, chosen: Chosen) -> tuple[dict[str, Stored], dict[str, set[str]]]:
    """What is there and whole: finished files, and the tensors of unfinished ones, by sample id."""
    found: dict[str, Stored] = {}
    parts: dict[str, set[str]] = {}
    stream = rows(corpus, chosen.tokens)
    with ThreadPoolExecutor(4) as threads:
        while batch := list(itertools.islice(stream, _CHECKED_AHEAD)):
            for row, stored in zip(batch, threads.map(store.find, batch)):
                if stored:
                    found[row.id] = stored
            left = [row for row in batch if row.id not in found]
            for row, states in zip(left, threads.map(store.part, left)):
                if states:
                    parts[row.id] = set(states)
    return found, parts


def _capture(
    config: Config,
    plan: CapturePlan,
    corpus: Corpus,
    target_dir: Path,
    target: Target,
    store: StateFiles,
    state: Path,
    chosen: Chosen,
    found: dict[str, Stored],
    parts: dict[str, set[str]],
    say: Callable[[str], None],
) -> dict[str, tuple[str, str]]:
    """Run the passes that are needed; fills `found`. Returns (capture, reason) of the samples that failed."""
    missing = {
        capture.name: {
            id: tokens
            for id, tokens in chosen.tokens.items()
            if id not in found and capture.tensor not in parts.get(id, ())
        }
        for capture in plan.captures
    }
    needed = sum(
        plan.token_bytes * tokens
        - NUMBER_BYTES * tokens * sum(c.width for c in plan.captures if c.tensor in parts.get(id, ()))
        for id, tokens in chosen.tokens.items()
        if id not in found
    )
    # A file and the part that it replaces are there at once, for each request in flight.
    spare = config.hidden_states.concurrency * plan.token_bytes * chosen.longest if needed else 0
    durable.require_free_space(store.folder, needed + spare, "hidden states")
    # All servers are looked at before the first request.
    configs = {capture.name: prepare(config, capture) for capture in plan.captures if missing[capture.name]}
    failed: dict[str, tuple[str, str]] = {}
    for capture in plan.captures:
        wanted = {id: tokens for id, tokens in missing[capture.name].items() if id not in failed}
        if not wanted:
            continue
        say(f"capturing {capture.name} of {len(wanted)} samples, {sum(wanted.values()):,} tokens")
        one = Pass(configs[capture.name], target_dir, target, state, capture, store, partial(rows, corpus), wanted, say)
        one.run()
        found.update(one.got.stored)
        failed |= {id: (capture.name, reason) for id, reason in one.got.failed.items()}
    lost = [id for id in chosen.tokens if id not in found and id not in failed]
    if lost:
        raise UserError(
            f"{store.parts}: parts of {len(lost)} samples vanished meanwhile, as that of {lost[0]}: run again"
        )
    return failed


def _manifest(
    config: Config,
    plan: CapturePlan,
    corpus: Corpus,
    target: Target,
    chosen: Chosen,
    found: dict[str, Stored],
    failed: dict[str, tuple[str, str]],
) -> dict[str, Any]:
    """The ledger of the folder. Holds no time: equal inputs and numbers, equal bytes.

    `chosen` = `samples` + `failed`; files are in the order of the corpus.
    """
    files = [found[id] for id in chosen.tokens if id in found]
    launch = config.engine.launch.model_dump(mode="json", exclude={"env"})
    flags = {capture.name: capture.flags for capture in plan.captures}
    return {
        "schema_version": SCHEMA_VERSION,
        "method": plan.method,
        "tensors": {
            "input_ids": {"dtype": "int64", "shape": ["tokens"]},
            "loss_mask": {"dtype": "int64", "shape": ["tokens"]},
            **{c.tensor: {"dtype": DTYPE, "shape": ["tokens", c.width], "holds": c.name} for c in plan.captures},
        },
        "layers": {
            "hidden_states": list(plan.layers),
            "outputs_of": [layer - 1 for layer in plan.layers],
            "of": plan.shape.layers,
            "hidden_size": plan.shape.hidden_size,
            "last": "after the final norm" if len(plan.captures) > 1 else None,
        },
        "target": target.provenance(),
        "engine": {
            "kind": config.engine.kind,
            "versions": sorted({file.engine for file in files}),
            "launch": launch,
            "flags": flags,
        },
        "corpus": {
            "version": corpus.manifest.version,
            "manifest": durable.sha256_file(corpus.directory / "manifest.json"),
        },
        "settings": stage_settings(config, "hidden_states")["hidden_states"],
        "totals": {
            "chosen": len(chosen.tokens),
            "samples": len(files),
            "failed": len(failed),
            "tokens": sum(file.tokens for file in files),
            "bytes": sum(file.bytes for file in files),
        },
        "failed": [
            {"id": id, "capture": failed[id][0], "reason": failed[id][1]} for id in chosen.tokens if id in failed
        ],
        "files": [asdict(file) for file in files],
        "code": code_version(),
    }
