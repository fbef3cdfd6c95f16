"""Samples that a real template and tokenizer made from conversations, for tests of exports."""

import random

from scripts.lib.core.records import Message, Sample
from scripts.lib.target.model import Target

WORDS = ["the", "cat", "river", "über", "東京", "proves", "that", "x", "=", "2", "Prague,", "purple", "engine"]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def answered(target: Target, number: int, turns: int = 1, words: int = 30, **changes) -> Sample:
    """A conversation as the pipeline leaves it: rendered prompts, answers' ids with their stop token."""
    rng = random.Random(number)
    messages: list[Message] = []
    ids: list[int] = []
    mask: list[int] = []
    for _ in range(turns):
        messages.append(Message("user", text(rng, 5) + "?"))
        prompt = target.render(messages)
        assert prompt[: len(ids)] == ids
        answer = text(rng, rng.randint(2, words))
        output = [*target.encode(answer), min(target.eos_ids - {0})]
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(output)
        ids = prompt + output
        messages.append(Message("assistant", answer))
    prompt_id = f"{number:032x}"
    values = {
        "id": prompt_id,
        "prompt_id": prompt_id,
        "dataset": "alpha",
        "input_ids": ids,
        "loss_mask": mask,
        "ids_origin": "engine",
        "outcome": "ok",
        "messages": messages,
    }
    return Sample(**(values | changes))


CALL = '[{"function": {"name": "weather", "arguments": {"city": "Brno", "days": 2}}}]'
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


def with_tools(target: Target, number: int) -> Sample:
    """A conversation with a thought, a tool call and its result (class A: the ids are not the point here)."""
    sample = answered(target, number)
    question, answer = sample.messages
    sample.messages = [
        question,
        Message("assistant", "", reasoning="I need the weather.", tool_calls=CALL),
        Message("tool", "Rain."),
        answer,
    ]
    sample.tools = TOOLS
    return sample
