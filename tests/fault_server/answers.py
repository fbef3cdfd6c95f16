"""What a fleet of fault servers answers: a function of the prompt ids and the fleet's seed alone."""

import hashlib
import random
from array import array
from dataclasses import dataclass

HIDDEN_SIZE, LAST = 16, -1  # numbers per state; the layer that stands for the last one
FIRST_ID, LAST_ID = 1_000, 20_000  # of answers: plain text in every tokenizer of interest
_SYLLABLES = ["ka", "lo", "mi", "ter", "sun", "ve", "ra", "nod", "el", "qui", "bas", "tor"]


@dataclass(frozen=True)
class Answers:
    """What the fleet answers: the same for all its servers."""

    seed: int = 0
    median_tokens: float = 30.0  # of the log-normal length
    spread: float = 0.8  # sigma of the logarithm
    stop_id: int = 2

    def __call__(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], str]:
        """(ids, finish reason) of the answer to a prompt. At least four tokens and the stop token."""
        dice = random.Random(f"{self.seed} {digest(prompt_ids)}")
        length = 4 + round(dice.lognormvariate(0, self.spread) * self.median_tokens)
        ids = [dice.randrange(FIRST_ID, LAST_ID) for _ in range(min(length, max_tokens))]
        return (ids, "length") if length >= max_tokens else ([*ids, self.stop_id], "stop")


def digest(ids: list[int]) -> str:
    """The log's name of a list of ids."""
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).hexdigest()


def text_of(ids: list[int]) -> str:
    """A text that stands for ids, one word per id: what a server without ids returns."""
    words = []
    for token in ids:
        first, second = divmod(token % 144, 12)
        words.append(_SYLLABLES[first] + _SYLLABLES[second])
    return " ".join(words)


def states_of(ids: list[int], layers: list[int]) -> list[list[float]]:
    """Hidden states of a prompt, one row per id: numbers that bfloat16 holds, other ones for each id, place and layer."""
    dice = [random.Random(f"{layer} {digest(ids)}") for layer in layers]
    return [[one.randrange(-128, 128) / 2 ** one.randrange(8) for one in dice for _ in range(HIDDEN_SIZE)] for _ in ids]
