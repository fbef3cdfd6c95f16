"""Stage 3 on ready conversations against the `tokenizers` library alone on the same text, side by side.

python -m benchmarks.tokenize --conversations 4000 --turns 2

The library alone gets the finished text of every sample in memory and returns ids: no template, no mask, no files. Ours
renders the template turn by turn, tokenizes and makes masks; the stage also reads and writes Parquet. Contenders run in
turns, on one thread each, and CPU time is what counts: what else the machine does then matters little.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# One thread: a run has as many jobs as cores. Must be set before the tokenizer's threads start.
os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core.records import Message, Prompt, Sample, read_rows, write_rows
from scripts.lib.target.model import Target
from scripts.lib.target.prepare import prepare_target
from scripts.lib.tokens.conversations import from_conversations, tokenize_conversations

TEXTS_AT_ONCE = 256


def generate(target: Target, conversations: int, turns: int, words: int, seed: int) -> list[Prompt]:
    """Class-A prompts: words as frequent as in prose, punctuation, numbers, code-like lines.

    The words are tokens of the vocabulary, so that a word costs about as many tokens as in real text.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, target.vocab_size, 40_000).tolist()
    lexicon = [word for word in (target.decode([token]).strip() for token in drawn) if word.isalpha()]
    marks = [", ", ". ", "\n", "\n\n", " (", ") ", ": ", " = ", "; "]

    def text(length: int) -> str:
        picked = rng.zipf(1.3, length) % len(lexicon)
        ends = rng.random(length)
        return "".join(
            lexicon[word]
            + (" " if end < 0.85 else str(int(end * 1e4)) + " " if end < 0.88 else marks[int(end * 1e4) % len(marks)])
            for word, end in zip(picked, ends)
        ).strip()

    prompts = []
    for number in range(conversations):
        messages = []
        for _ in range(turns):
            messages += [Message("user", text(words // 8 + 2)), Message("assistant", text(words))]
        prompts.append(
            Prompt(id=f"{number:032x}", dataset="bench", source=f"bench:{number}", key="", messages=messages)
        )
    return prompts


def contenders(target: Target, config: Config, prompts: list[Prompt], folder: Path) -> dict[str, Callable[[], int]]:
    """Name -> a run that returns the number of tokens it made."""
    source, output = folder / "prompts.parquet", folder / "tokens.parquet"
    write_rows(source, Prompt, prompts, {})
    texts = [target.decode(sample.input_ids) for sample in from_conversations(target, prompts)]
    assert target._backend is not None
    backend = target._backend

    def alone() -> int:
        total = 0
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            for encoding in backend.encode_batch_fast(texts[first : first + TEXTS_AT_ONCE], add_special_tokens=False):
                total += len(encoding.ids)
        return total

    def ours() -> int:
        total = 0
        for sample in from_conversations(target, prompts):
            total += len(sample.input_ids)
        return total

    def stage() -> int:
        tokenize_conversations(config, "bench", target, source, output)
        return sum(len(sample.input_ids) for sample in read_rows(output, Sample)) if not counted else counted[0]

    counted: list[int] = []
    counted.append(stage())
    return {"tokenizers alone": alone, "render + tokenize + mask": ours, "whole stage with files": stage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="embedded:smollm2", help="whose tokenizer and template, as in model.name")
    parser.add_argument("--conversations", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=1, help="answers per conversation")
    parser.add_argument("--words", type=int, default=500, help="words of an answer")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender; the median counts")
    arguments = parser.parse_args()
    sections = {"model": {"name": arguments.model}, "datasets": {"bench": {"class": "A", "source": "x"}}}
    config = parse_config(sections, "benchmark")
    with tempfile.TemporaryDirectory() as directory:
        target = prepare_target(config, Path(directory) / "target")
        prompts = generate(target, arguments.conversations, arguments.turns, arguments.words, seed=0)
        runs = contenders(target, config, prompts, Path(directory))
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                start = time.process_time()
                tokens = run()
                speeds[name].append(tokens / (time.process_time() - start))
    alone = statistics.median(speeds["tokenizers alone"])
    print(f"{arguments.model}: {arguments.conversations} conversations of {arguments.turns} answers, {tokens:,} tokens")
    for name, values in speeds.items():
        median = statistics.median(values)
        print(f"{name:26} {median:12,.0f} tokens per CPU second  {median / alone:5.2f} of tokenizers alone")


if __name__ == "__main__":
    main()
