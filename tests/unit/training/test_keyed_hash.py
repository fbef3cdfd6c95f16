"""The numbers by which every corpus is ordered. They may never change."""

import pyarrow as pa

from scripts.lib.training.keyed_hash import keyed_hash

KEY = b"0f1e2d3c4b5a6978"
# As pandas 3.1.1 gives them: hash_array(texts, hash_key=KEY.decode(), categorize=False).
HASHES = {
    "": 0x9AF7033CFC30BF9D,
    "a": 0xDFB2E6EDFB48206D,
    "prompt 7": 0x16E36AFB86F5C0B1,
    "0123456789abcdef": 0x9EDB3B7001A730FF,
    "0123456789abcdef0123456789abcdef": 0x61CB16AD8EE605C3,
    "0123456789abcdef0123456789abcdef/1": 0x5E50B1B746CA3860,
    "naïve 漢字": 0xE206A32BC41B0505,
    "x" * 40: 0x5103D0C29649D19F,
}


def test_known_numbers() -> None:
    assert keyed_hash(pa.array(HASHES), KEY).tolist() == list(HASHES.values())


def test_they_depend_on_the_text_alone() -> None:
    texts, numbers = list(HASHES) * 2000, list(HASHES.values()) * 2000  # more than are hashed at once
    array = pa.array(texts)
    assert keyed_hash(array, KEY).tolist() == numbers
    assert keyed_hash(array.slice(3, 9001), KEY).tolist() == numbers[3:9004]
    pieces = pa.chunked_array([array.slice(1, 2), array.slice(0, 0), array.slice(7, 5)])
    assert keyed_hash(pieces, KEY).tolist() == numbers[1:3] + numbers[7:12]
    assert keyed_hash(pa.array([], pa.string()), KEY).tolist() == []
    assert keyed_hash(pa.array(texts, pa.large_string()), KEY).tolist() == numbers


def test_another_key_another_order() -> None:
    assert not set(keyed_hash(pa.array(HASHES), KEY[::-1]).tolist()) & set(HASHES.values())
