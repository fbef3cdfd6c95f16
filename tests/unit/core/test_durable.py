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


def test_a_full_disk_is_told_with_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, durable.replacing(tmp_path / "a") as temporary:
        temporary.symlink_to("/dev/full")
        temporary.write_bytes(b"x" * 100_000)
    assert caught.value.filename == str(tmp_path / "a")


def test_read_json_says_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        durable.read_json(tmp_path / "absent")
    (tmp_path / "broken").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        durable.read_json(tmp_path / "broken")
    for text in ("[]", "null", '"a"', "7"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(UserError, match="other: not a JSON object"):
            durable.read_json(tmp_path / "other")


def test_a_link_where_there_are_links(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    durable.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")


# What link(2) gives on ext4 with another device, FAT and s3fs, CIFS, gcsfuse, some FUSE, Android, full directories.
@pytest.mark.parametrize("name", ["EXDEV", "EPERM", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EACCES", "EMLINK"])
def test_a_copy_of_the_same_mode_where_there_are_none(tmp_path, monkeypatch, name):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "a").chmod(0o440)

    def refuse(*_):
        raise OSError(getattr(errno, name), "refused")

    monkeypatch.setattr(os, "link", refuse)
    durable.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"abc"
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o440
    with pytest.raises(FileNotFoundError):
        durable.link_or_copy(tmp_path / "absent", tmp_path / "c")


def test_a_copy_never_writes_through_a_link_that_a_killed_writer_left(tmp_path, monkeypatch):
    (tmp_path / "older").write_bytes(b"older")
    os.link(tmp_path / "older", tmp_path / "left")
    (tmp_path / "a").write_bytes(b"abc")

    def refuse(*_):
        raise OSError(errno.EXDEV, "refused")

    monkeypatch.setattr(os, "link", refuse)
    durable.link_or_copy(tmp_path / "a", tmp_path / "left")
    assert (tmp_path / "older").read_bytes() == b"older"
    assert (tmp_path / "left").read_bytes() == b"abc"


def test_sha256_and_free_space(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert durable.sha256_file(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    durable.require_free_space(tmp_path, 1, "this")
    with pytest.raises(UserError, match="the merge needs 1000000000.00 GB free"):
        durable.require_free_space(tmp_path, 10**18, "the merge")
