"""Which of the clean prompts are used: identity, seeded order, duplicates, evaluation sets.

Nothing here depends on the order of a source's rows: ids are hashes of content, the order is a hash of seed and id.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from scripts.lib.provenance import digest
from scripts.lib.records import Message
from scripts.lib.sources.formats import Conversation

_SPACE = re.compile(r"\s+")
# Han, kana and Hangul are written without spaces: each character counts as a word.
_WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
# Enough for a Jaccard estimate of +-0.09 (one standard error at 0.5 is 0.044).
PERMUTATIONS = 128
SHINGLE_WORDS = 3


def normalised(text: str) -> str:
    """The text without differences that don't change a question: case, spacing, composed or decomposed letters."""
    return _SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip().casefold()


def words(text: str) -> list[str]:
    """Lower-case words of a text, punctuation left out."""
    return _WORD.findall(unicodedata.normalize("NFC", text).casefold())


def prompt_texts(messages: Iterable[Message]) -> list[str]:
    """The user's turns: what makes two prompts the same question."""
    return [message.content for message in messages if message.role == "user"]


def prompt_key(conversation: Conversation) -> bytes:
    """16 bytes, equal for duplicates: system and user turns normalised, and tools; the ids of ready tokens.

    Answers are not in it: as class A, two answers to one prompt are duplicates too.
    """
    if conversation.input_ids is not None:
        value: Any = conversation.input_ids
    else:
        turns = [[m.role, normalised(m.content)] for m in conversation.messages if m.role in ("system", "user")]
        value = [turns, conversation.tools]
    return bytes.fromhex(digest(value))


def prompt_id(dataset: str, conversation: Conversation, occurrence: int = 0) -> str:
    """32 hex digits: hash of dataset, the row's own id in the source and its messages, never of a position.

    Rows that are equal in all of it are told apart by counting them: `occurrence` is 0 for the first.
    """
    messages = [[m.role, m.content, m.reasoning, m.tool_calls] for m in conversation.messages]
    value: list[Any] = [dataset, conversation.row_id, messages, conversation.tools]
    if conversation.input_ids is not None:
        value += [conversation.input_ids, conversation.loss_mask]
    return digest([*value, occurrence] if occurrence else value)


def seeded_order(seed: int, id: str) -> bytes:
    """8 bytes by which prompts are sorted: a random order that stays when the source grows."""
    return hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=8).digest()


def shard_of(id: str, shards: int) -> int:
    """The shard that a prompt belongs to (docs/architecture.md)."""
    return int(id[:8], 16) % shards


class Decontamination:
    """Finds prompts that an evaluation set holds: an n-gram of words in common, or the same short text."""

    def __init__(self, texts: Iterable[str], ngram: int = 13):
        self.ngram = ngram
        self._ngrams: set[bytes] = set()
        self._short: set[bytes] = set()
        for text in texts:
            found = words(text)
            if len(found) < ngram:
                self._short.add(_hash(" ".join(found)))
            else:
                self._ngrams.update(_ngrams(found, ngram))

    def matches(self, texts: Iterable[str]) -> bool:
        """Whether one of the prompt's turns is contaminated."""
        for text in texts:
            found = words(text)
            if len(found) < self.ngram:
                if _hash(" ".join(found)) in self._short:
                    return True
            elif any(ngram in self._ngrams for ngram in _ngrams(found, self.ngram)):
                return True
        return False


def _ngrams(found: list[str], size: int) -> Iterator[bytes]:
    return (_hash(" ".join(found[start : start + size])) for start in range(len(found) - size + 1))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class NearDuplicates:
    """MinHash index of prompts: finds one whose word 3-grams overlap by at least `threshold` (Jaccard)."""

    def __init__(self, threshold: float):
        from datasketch import MinHashLSH

        self.threshold = threshold
        self._index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._signatures: dict[str, Any] = {}

    def add_or_find(self, id: str, texts: Iterable[str]) -> str | None:
        """The id of a similar prompt that was added before; None when there is none and this one was added."""
        from datasketch import LeanMinHash, MinHash

        found = [word for text in texts for word in words(text)]
        shingles = {" ".join(found[start : start + SHINGLE_WORDS]) for start in range(max(1, len(found) - 2))}
        signature = MinHash(PERMUTATIONS, seed=1, hashfunc=_hash32)
        signature.update_batch(sorted(shingle.encode() for shingle in shingles))
        signature = LeanMinHash(signature)
        # The index is a coarse sieve with false alarms: the signatures decide.
        similar = (other for other in self._index.query(signature))
        best = max(((signature.jaccard(self._signatures[other]), other) for other in similar), default=(0.0, ""))
        if best[0] >= self.threshold:
            return best[1]
        self._index.insert(id, signature)
        self._signatures[id] = signature
        return None


def _hash32(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")
