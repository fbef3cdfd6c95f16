"""Which of the clean prompts are used: identity, seeded order, duplicates, evaluation sets.

Nothing here depends on the order of a source's rows: ids are hashes of content, the order is a hash of seed and id.
Only of equal prompts the first row is used, so that a source may grow.
"""

import hashlib
import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Message
from scripts.lib.prompts.sources.formats import Conversation

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
        if conversation.template_kwargs is not None:  # may hold a system prompt
            value.append(conversation.template_kwargs)
    return bytes.fromhex(digest(value))


def prompt_id(dataset: str, conversation: Conversation, occurrence: int = 0) -> str:
    """32 hex digits: hash of dataset, the row's own id in the source and its messages, never of a position.

    Rows that are equal in all of it are told apart by counting them: `occurrence` is 0 for the first.
    """
    messages = [message.identity() for message in conversation.messages]
    value: list[Any] = [dataset, conversation.row_id, messages, conversation.tools]
    if conversation.template_kwargs is not None:
        value.append(conversation.template_kwargs)
    if conversation.input_ids is not None:
        value += [conversation.input_ids, conversation.loss_mask]
    return digest([*value, occurrence] if occurrence else value)


def seeded_order(seed: int, own_id: str) -> bytes:
    """8 bytes by which prompts are sorted: a random order that stays when the source grows."""
    return hashlib.blake2b(f"{seed}:{own_id}".encode(), digest_size=8).digest()


def shard_of(own_id: str, shards: int) -> int:
    """The shard that a prompt belongs to (docs/architecture.md)."""
    return int(own_id[:8], 16) % shards


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


def _hash(data: str | bytes) -> bytes:
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=8).digest()


class NearDuplicates:
    """MinHash index of prompts: finds one whose word 3-grams overlap by at least `threshold` (Jaccard).

    Signatures and their bands lie in `database`, so that the index may outgrow the memory.
    """

    def __init__(self, threshold: float, database: sqlite3.Connection):
        from datasketch import MinHashLSH

        self.threshold = threshold
        # How many bands of how many rows find pairs at this threshold best.
        self._bands = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS).hashranges
        self._db = database
        self._db.execute("CREATE TABLE signature (number INTEGER PRIMARY KEY, id TEXT, hashes BLOB)")
        self._db.execute("CREATE TABLE band (band INTEGER, hash BLOB, number INTEGER)")
        self._db.execute("CREATE INDEX by_band ON band (band, hash)")

    def add_or_find(self, own_id: str, texts: Iterable[str]) -> str | None:
        """The id of the most similar prompt that was added before; None when there is none and this one was added."""
        hashes = _signature(texts)
        bands = [(band, _hash(hashes[start:end].tobytes())) for band, (start, end) in enumerate(self._bands)]
        similar: dict[str, float] = {}
        # Bands are a coarse sieve with false alarms: the signatures decide.
        for band in bands:
            for other, stored in self._db.execute(
                "SELECT id, hashes FROM band JOIN signature USING (number) WHERE band = ? AND hash = ?", band
            ):
                similar[other] = float(np.mean(np.frombuffer(stored, hashes.dtype) == hashes))
        best = max(similar.items(), key=lambda item: (item[1], item[0]), default=("", 0.0))
        if best[1] >= self.threshold:
            return best[0]
        number = self._db.execute(
            "INSERT INTO signature (id, hashes) VALUES (?, ?)", (own_id, hashes.tobytes())
        ).lastrowid
        self._db.executemany("INSERT INTO band VALUES (?, ?, ?)", [(*band, number) for band in bands])
        return None


def _signature(texts: Iterable[str]) -> np.ndarray:
    """MinHash values, shape [PERMUTATIONS], of the texts' word shingles."""
    from datasketch import MinHash

    found = [word for text in texts for word in words(text)]
    shingles = {" ".join(found[start : start + SHINGLE_WORDS]) for start in range(max(1, len(found) - 2))}
    signature = MinHash(PERMUTATIONS, seed=1, hashfunc=_hash32)
    signature.update_batch(sorted(shingle.encode() for shingle in shingles))
    return signature.hashvalues.astype(np.uint32)


def _hash32(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")
