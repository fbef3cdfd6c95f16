"""Runs without an engine: all stages are the real ones, only the answers are made up by the test."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson

from scripts.lib.completions.progress import Figures, ProgressFile
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.config.stage_settings import stage_settings
from scripts.lib.core import durable
from scripts.lib.core.records import OUTCOMES, Completion, Message, Prompt, Turn, read_rows, write_rows
from scripts.lib.prompts.prepare import prepare_prompts
from scripts.lib.target.model import Target, load_target
from scripts.lib.tokens.completions import tokenize_completions
from scripts.lib.tokens.conversations import tokenize_conversations
from scripts.lib.training.merge import merge, receipt
from scripts.lib.validated.summary import summarize
from scripts.lib.validated.validate import ShardFiles, validate_tokens
from tests.generation import MODEL, WORDS, target_folder

SHARDS = 2
GENERATION_SECONDS = 10  # of every shard, all at the same time
ENDPOINT = "http://user:secret@127.0.0.1:3000/v1?key=secret"

# (dataset, shard, prompt) -> the completion of a prompt
Answerer = Callable[["Answers", str, Prompt], Completion]


class Answers:
    """Makes completions of the embedded model's target."""

    def __init__(self, target: Target):
        self.target = target
        (self.eos,) = target.encode("<|im_end|>")

    def text(self, prompt: Prompt, words: int) -> str:
        """Words that depend on nothing but the prompt."""
        dice = random.Random(prompt.id)
        return " ".join(dice.choice(WORDS) for _ in range(words)).capitalize() + "."

    def ok(self, prompt: Prompt, words: int, **turn) -> Completion:
        """An answer that ended by itself."""
        return self._completion(prompt, "ok", self.text(prompt, words), "stop", **turn)

    def cut(self, prompt: Prompt, words: int, **turn) -> Completion:
        """An answer that reached max_tokens."""
        return self._completion(prompt, "length", self.text(prompt, words), "length", flags=["truncated"], **turn)

    def failed(self, prompt: Prompt, outcome: str, reason: str = "made up") -> Completion:
        """A prompt without an answer."""
        return Completion(prompt.id, prompt.dataset, outcome, reason, messages=prompt.messages)

    def _completion(self, prompt: Prompt, outcome: str, text: str, finish_reason: str, **turn) -> Completion:
        output = self.target.encode(text) + ([self.eos] if finish_reason == "stop" else [])
        turn = {"endpoint": ENDPOINT, "model": "made", "seconds": 0.5} | turn
        turns = [Turn(self.target.render(prompt.messages), output, finish_reason, text, **turn)]
        messages = [*prompt.messages, Message("assistant", text)]
        return Completion(prompt.id, prompt.dataset, outcome, messages=messages, turns=turns)


def steady(answers: Answers, shard: str, prompt: Prompt) -> Completion:
    """Every prompt is answered, in about 40 words."""
    return answers.ok(prompt, random.Random(prompt.id).randint(30, 50))


class MadeRun:
    """A results folder that grows stage by stage. `code` and `chat` are generated, `kept` is of class A."""

    def __init__(self, folder: Path, rows: int = 40, **settings):
        self.folder, self.results = folder, folder / "results"
        sources = {name: folder / f"{name}.jsonl" for name in ("code", "chat", "kept")}
        for name, path in sources.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in self._rows(name, rows)))
        self.values = {
            "model": MODEL,
            "lanes": {"short": {"max_tokens": 256, "concurrency": 4}},
            "shards": SHARDS,
            "datasets": {
                "code": {"class": "B", "source": str(sources["code"])},
                "chat": {"class": "B", "source": str(sources["chat"])},
                "kept": {"class": "A", "source": str(sources["kept"])},
            },
        } | settings
        if not (self.results / "target").exists():
            shutil.copytree(target_folder(), self.results / "target")
        self.target = load_target(self.results / "target")
        self.answers = Answers(self.target)

    @staticmethod
    def _rows(name: str, count: int) -> list[dict]:
        rows: list[dict] = []
        for row in range(count):
            dice = random.Random(f"{name} {row}")
            question = f"Part {row} of {name} <b>&{row}</b>: {' '.join(dice.choices(WORDS, k=dice.randint(4, 25)))}?"
            answer = f"It is {' '.join(dice.choices(WORDS, k=20))}."
            if name == "kept":
                rows.append(
                    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
                )
            else:
                rows.append({"messages": [{"role": "user", "content": question}]})
        # One row that is there twice, one that is blank.
        return [*rows, rows[0], {"messages": [{"role": "user", "content": " "}]}]

    @property
    def config(self) -> Config:
        return parse_config(self.values, "made run")

    def shards(self, stage: str, name: str) -> list[Path]:
        return [self.results / stage / name / f"{shard}.parquet" for shard in self.config.shard_names()]

    def prompts(self) -> None:
        earlier: list[Path] = []
        for name in self.config.datasets:
            folder = self.results / "prompts" / name
            prepare_prompts(self.config, name, self.target, folder, earlier, say=lambda line: None)
            earlier.append(folder / "keys.parquet")

    def completions(self, answer: Answerer = steady, shards: int = SHARDS) -> None:
        """Answer the first `shards` shards of every class-B dataset."""
        for name in self.config.by_class("B"):
            for path, output in [*zip(self.shards("prompts", name), self.shards("completions", name))][:shards]:
                made = [answer(self.answers, path.stem, prompt) for prompt in read_rows(path, Prompt)]
                provenance = {
                    "stage": "completions",
                    "settings": stage_settings(self.config, "completions", name),
                    "target": self.target.provenance(),
                    "engine": {"kind": "llamacpp", "version": "1.0"},
                }
                write_rows(output, Completion, made, provenance)
                self._progress(name, path.stem, made)

    def _progress(self, name: str, shard: str, made: list[Completion]) -> None:
        outcomes = Counter(one.outcome for one in made)
        turns = [turn for one in made for turn in one.turns]
        completed = sum(count for name, count in outcomes.items() if OUTCOMES[name].answered)
        output = sum(len(turn.output_ids) for turn in turns)
        figures = Figures(
            total=len(made),
            completed=completed,
            failed=len(made) - completed,
            total_input_tokens=sum(len(turn.prompt_ids) for turn in turns),
            total_output_tokens=output,
            avg_output_tokens=output / len(made),
            cost_usd=sum(turn.cost_usd for turn in turns),
            elapsed_hours=GENERATION_SECONDS / 3600,
            outcomes=dict(outcomes),
            status="done",
        )
        ProgressFile(self.results / "state", self.config, name, shard).write(figures)

    def validated(self) -> None:
        """Tokenize and validate what is there; the summary when it is all."""
        summaries = []
        for name, dataset in self.config.datasets.items():
            for prompts, tokens, output in zip(
                *(self.shards(stage, name) for stage in ("prompts", "tokens", "validated"))
            ):
                completions = self.results / "completions" / name / prompts.name if dataset.data_class == "B" else None
                if completions is None:
                    tokenize_conversations(self.config, name, self.target, prompts, tokens)
                elif completions.exists():
                    tokenize_completions(self.config, name, self.target, prompts, completions, tokens)
                else:
                    continue
                summary = output.with_suffix(".json")
                rejects = output.with_suffix(".rejects.parquet")
                validate_tokens(
                    self.config, self.target, ShardFiles(name, prompts, completions, tokens, output, rejects, summary)
                )
                summaries.append(summary)
        durable.write_json(self.results / "validated" / "summary.json", summarize(summaries))

    def merged(self) -> None:
        shards = [path for name in self.config.datasets for path in self.shards("validated", name)]
        summary = durable.read_json(self.results / "validated" / "summary.json")
        manifest = merge(self.config, shards, summary, self.results / "training", say=lambda line: None)
        durable.write_json(self.results / "state" / "training.json", receipt(manifest))

    def finish(self, answer: Answerer = steady) -> None:
        """All stages."""
        self.prompts()
        self.completions(answer)
        self.validated()
        self.merged()
