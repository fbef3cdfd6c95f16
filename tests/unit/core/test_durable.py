"""A file is there whole or not at all."""

import errno
import hashlib
import os

import pytest

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "a.json"
    durable.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), durable.replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError("in the middle")
    assert durable.read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), real_fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), real_replace(a, b)))
    durable.write_bytes(tmp_path / "a", b"x")
    assert len(calls) == 3
    assert calls[0].endswith(durable.TEMPORARY_SUFFIX)
    assert calls[1:] == ["rename", str(tmp_path)]


def test_no_space_at_sync_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    durable.write_bytes(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        durable.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_read_json_says_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        durable.read_json(tmp_path / "absent")
    (tmp_path / "broken").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        durable.read_json(tmp_path / "broken")


def test_sha256_and_free_space(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert durable.sha256_file(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    durable.require_free_space(tmp_path, 1, "this")
    with pytest.raises(UserError, match="the merge needs 1000000000.00 GB free"):
        durable.require_free_space(tmp_path, 10**18, "the merge")
