"""Compressed files: every kind, in several members, damaged and cut short."""

import bz2
import gzip
import io
import json
import lzma
import tracemalloc

import pytest
import zstandard

from scripts.lib.core.errors import UserError
from scripts.lib.prompts.sources.compression import Members
from tests.raw_rows import read, values

PACKERS = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("ending", PACKERS)
def test_compressions(ending):
    lines = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    expected = [{"prompt": "a"}, {"prompt": "b"}]
    assert values(f"a.jsonl.{ending}", PACKERS[ending](lines)) == expected
    assert values("misnamed.jsonl", PACKERS[ending](lines)) == expected
    assert values(f"a.json.{ending}", PACKERS[ending](json.dumps(expected).encode())) == expected


def test_zstandard_in_several_frames():
    assert values("a.jsonl.zst", zstandard.compress(b'{"a": 1}\n') + zstandard.compress(b'{"a": 2}\n')) == [
        {"a": 1},
        {"a": 2},
    ]


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_damaged_archive_stops_with_the_files_name(ending):
    packed = PACKERS[ending](json.dumps({"prompt": "x" * 5000}).encode() * 50)
    with pytest.raises(UserError, match=rf"a\.jsonl\.{ending}: can't be read"):
        # The first half whole, then noise.
        read(f"a.jsonl.{ending}", packed[: len(packed) // 2] + b"\x00\xff" * 40)


LINES = [b'{"a": 1}\n', b'{"a": 2}\n', b'{"a": 3}\n']
ROWS = [{"a": 1}, {"a": 2}, {"a": 3}]
SKIPPABLE = b"\x5d\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"


@pytest.mark.parametrize("ending", PACKERS)
def test_members_one_after_the_other_are_all_read(ending):
    assert values(f"a.jsonl.{ending}", b"".join(PACKERS[ending](line) for line in LINES)) == ROWS


@pytest.mark.parametrize("ending", PACKERS)
def test_zeros_between_and_after_members_are_padding(ending):
    members = [PACKERS[ending](line) + b"\0" * 12 for line in LINES]
    assert values(f"a.jsonl.{ending}", b"".join(members)) == ROWS


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("tail", [b"x", b"something else", b"\0\0\0x and more"])
def test_what_follows_a_member_is_no_secret(ending, tail):
    """bz2 and lzma of the standard library end quietly here, and a second half would be missing."""
    with pytest.raises(UserError, match=rf"a\.jsonl\.{ending}: can't be read: .*follows"):
        read(f"a.jsonl.{ending}", PACKERS[ending](LINES[0]) + tail + PACKERS[ending](LINES[1]))


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_cut_short_is_an_error_whatever_came_before(ending, kept):
    """zstandard's reader gives what there is and ends."""
    data = "".join(json.dumps({"prompt": f"Question {n * 7919 % 10007}?"}) + "\n" for n in range(3000)).encode()
    packed = PACKERS[ending](data)
    with pytest.raises(UserError, match=rf"a\.jsonl\.{ending}: can't be read: it ends in the middle"):
        read(f"a.jsonl.{ending}", packed[: int(len(packed) * kept)])


def test_skippable_frames_hold_no_rows():
    """pzstd begins each of its frames with one, seekable zstd ends with one."""
    frames = [zstandard.compress(line) for line in LINES]
    for data in (SKIPPABLE + SKIPPABLE.join(frames), b"".join(frames) + SKIPPABLE, SKIPPABLE * 3 + b"".join(frames)):
        assert values("a.jsonl.zst", data) == ROWS
    large = b"\x50\x2a\x4d\x18" + (200_000).to_bytes(4, "little") + bytes(range(1, 201)) * 1000
    assert values("a.jsonl", large + b"".join(frames) + large) == ROWS
    with pytest.raises(UserError, match="in the middle of a skippable frame"):
        read("a.jsonl.zst", b"".join(frames) + large[:-1])


@pytest.mark.parametrize("window_log", [28, 30, 31])
def test_zstandard_with_long_windows(window_log):
    """`zstd --long=31`: beyond the 128 MiB that readers take without being told."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # tells no size: the window counts
    packed = packer.compress(b"".join(LINES)) + packer.flush()
    assert values("a.jsonl.zst", packed) == ROWS


def test_packed_twice():
    assert values("a.jsonl.gz", gzip.compress(gzip.compress(b"".join(LINES)))) == ROWS
    assert values("a.jsonl.gz.zst", zstandard.compress(gzip.compress(b"".join(LINES)))) == ROWS


def test_content_is_decompressed_in_pieces():
    """The same row for thirty megabytes, in a few kilobytes of each kind: one piece is in memory, not all."""
    size = 30_000_000
    for ending, packer in PACKERS.items():
        members = Members(io.BytesIO(packer(LINES[0] * (size // len(LINES[0])))))
        buffer = bytearray(1 << 20)
        tracemalloc.start()
        read = 0
        while filled := members.readinto(buffer):
            read += filled
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert read == size - size % len(LINES[0]), ending
        assert peak < size / 2, ending
