"""The product's own stages over one input: what comes out of them, in plain values."""

import contextlib
import io
import itertools
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import (
    generate_completions,
    prepare_prompts,
    prepare_target,
    tokenize_completions,
    tokenize_conversations,
    validate_tokens,
)
from scripts.lib.core.records import Completion, Prompt, Sample, read_rows
from scripts.lib.target.model import Target, load_target

DATASET, SHARD = "case", "000"
CONTEXT = 1 << 17
VOCABULARY = 1 << 18  # a bare tokenizer tells no size: more than any of them has


@dataclass
class Run:
    """What became of one source. `error` is the line with which the stage ended that refused it."""

    source: str
    data_class: str
    target: Target
    error: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    asked: int = 0  # requests that the case's own server has answered, canaries among them

    @property
    def name(self) -> str:
        return f"{Path(self.source).name} ({self.data_class})"

    @property
    def counted(self) -> dict[str, int]:
        """Rows by reason and by change, samples by flag and by gate."""
        counts = {}
        for kind in ("reasons", "changes"):
            counts |= {name: entry["count"] for name, entry in self.report.get(kind, {}).items()}
        for sample in self.samples:
            for flag in sample.flags:
                counts[flag] = counts.get(flag, 0) + 1
        return counts | self.summary.get("rejects", {})

    def supervised(self, sample: Sample) -> list[str]:
        """The texts of the runs of ids with mask 1."""
        runs = itertools.groupby(zip(sample.input_ids, sample.loss_mask), key=lambda pair: pair[1])
        return [self.target.decode([token for token, _ in run]) for mask, run in runs if mask]

    def seen(self) -> str:
        """One line of what came, for people."""
        if self.error:
            return self.error[:300]
        answers = "".join(f"⟦{text}⟧" for sample in self.samples for text in self.supervised(sample))
        turns = " / ".join(f"{m.role}: {m.content}" for prompt in self.prompts for m in prompt.messages)
        counts = ", ".join(f"{name} {count}" for name, count in self.counted.items())
        return f"{self.report.get('kept', 0)} kept ({counts}) {answers or turns}"[:400]


class Bench:
    """A folder of work, and the targets that were prepared in it."""

    def __init__(self, work: Path, tokenizers: Path, templates: Path):
        self.work, self._tokenizers, self._templates = work, tokenizers, templates
        self._targets: dict[str, Path] = {}
        self._count = itertools.count()

    def folder(self) -> Path:
        path = self.work / f"{next(self._count):03d}"
        path.mkdir(parents=True)
        return path

    def model(self, tokenizer: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The `model` section for `directory|template`, or for the embedded model where no tokenizers are."""
        if not tokenizer:
            return {"context_length": 8192, "chat_template_kwargs": kwargs}
        directory, _, template = tokenizer.partition("|")
        section = {"name": str(self._tokenizers / directory), "vocab_size": VOCABULARY, "context_length": CONTEXT}
        if template not in ("", "own"):
            section["chat_template"] = str(self._templates / f"{template}.jinja")
        return section | {"chat_template_kwargs": kwargs}

    def target(self, tokenizer: str, kwargs: dict[str, Any] | None = None) -> Path:
        key = json.dumps([tokenizer, kwargs or {}])
        if key not in self._targets:
            folder = self.folder()
            config = self.config(folder, tokenizer, kwargs or {}, {"class": "B", "source": "none"})
            problem = _stage(prepare_target, "--config", config, "--output", folder / "target")
            if problem:
                raise SystemExit(problem)
            self._targets[key] = folder / "target"
        return self._targets[key]

    def config(
        self, folder: Path, tokenizer: str, kwargs: dict[str, Any], dataset: dict[str, Any], **sections: Any
    ) -> Path:
        values = {
            "datasets": {DATASET: dataset},
            "model": self.model(tokenizer, kwargs),
            "shards": 1,
            "cleaning": {"max_reject_rate": 1.0},
            "selection": {"deduplicate": "none"},
            "lanes": {"short": {"max_tokens": 256, "concurrency": 1}},
        }
        path = folder / "config.json"
        path.write_text(json.dumps(values | sections), encoding="utf-8")
        return path

    def run(self, source: str, data_class: str, tokenizer: str, **sections: Any) -> Run:
        """One source through the stages of its class; class B without an engine ends with its prompts."""
        folder, target = self.folder(), self.target(tokenizer)
        config = self.config(folder, tokenizer, {}, {"class": data_class, "source": source}, **sections)
        run = Run(source, data_class, load_target(target))
        shared = ["--config", config, "--dataset", DATASET, "--target", target]
        prompts, completions, tokens = (
            folder / name / f"{SHARD}.parquet" for name in ("prompts", "completions", "tokens")
        )
        run.error = _stage(prepare_prompts, *shared, "--output", prompts.parent)
        if (prompts.parent / "report.json").is_file():
            run.report = json.loads((prompts.parent / "report.json").read_bytes())
        if run.error:
            return run
        run.prompts = list(read_rows(prompts, Prompt))
        if data_class == "A":
            run.error = _stage(tokenize_conversations, *shared, "--prompts", prompts, "--output", tokens)
        elif "engine" in sections:
            answers = ["--prompts", prompts, "--output", completions, "--state", folder / "state"]
            run.error = _stage(generate_completions, *shared, "--shard", SHARD, *answers)
            if completions.is_file():
                run.completions = list(read_rows(completions, Completion))
                inputs = ["--prompts", prompts, "--completions", completions]
                run.error = run.error or _stage(tokenize_completions, *shared, *inputs, "--output", tokens)
        if tokens.is_file():
            run.samples = list(read_rows(tokens, Sample))
            self._validate(run, folder, shared, prompts, completions, tokens)
        return run

    def _validate(self, run: Run, folder: Path, shared: list, prompts: Path, completions: Path, tokens: Path) -> None:
        answered = ["--completions", completions] if completions.is_file() else []
        written = ["--output", folder / "passed.parquet", "--rejects", folder / "rejects.parquet"]
        summary = folder / "summary.json"
        problem = _stage(
            validate_tokens,
            *shared,
            "--prompts",
            prompts,
            *answered,
            "--tokens",
            tokens,
            *written,
            "--summary",
            summary,
        )
        run.error = run.error or problem
        if summary.is_file():
            run.summary = json.loads(summary.read_bytes())


def _stage(entry: Any, *arguments: Any) -> str:
    """Run an entry; "" or its error line."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = entry.main([str(argument) for argument in arguments])
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    return "" if code == 0 else (lines or [f"exit code {code}"])[-1]


@contextlib.contextmanager
def served(script: Path) -> Iterator[str]:
    """The base URL of a case's own server, for as long as it is needed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5):
                break
            if process.poll() is not None:
                raise SystemExit(f"{script}: ended with {process.returncode}")
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def ids_of(samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    """Ids and masks, in an order that depends on nothing else."""
    return sorted((sample.input_ids, sample.loss_mask) for sample in samples)
