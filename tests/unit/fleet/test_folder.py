"""Where a run's processes meet, and how leases are counted."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from scripts.lib.core.errors import UserError, explain
from scripts.lib.core.locks import Lock, hold
from scripts.lib.fleet import tickets
from scripts.lib.fleet.folder import FleetFolder, private_directory
from scripts.lib.fleet.tickets import Ticket


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_key_is_the_results_folder_the_machine_and_the_allocation(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / "link").symlink_to(temporary / "state")
    plain = FleetFolder.of(temporary / "state").directory
    assert FleetFolder.of(temporary / "link").directory == plain
    assert FleetFolder.of(temporary / "other").directory != plain
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    job = FleetFolder.of(temporary / "state").directory
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert len({plain, job, FleetFolder.of(temporary / "state").directory}) == 3
    assert oct(plain.stat().st_mode & 0o777) == "0o700"
    assert oct(plain.parent.stat().st_mode & 0o777) == "0o700"


def test_folder_of_somebody_else_is_refused(temporary: Path) -> None:
    open_to_all = temporary / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(UserError, match="must be a folder that only you may enter"):
        private_directory(open_to_all)
    (temporary / "elsewhere").mkdir(mode=0o700)
    (temporary / "link").symlink_to(temporary / "elsewhere")
    with pytest.raises(UserError, match="must be a folder"):
        private_directory(temporary / "link")


def test_folder_of_another_user_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = private_directory(temporary / "theirs")
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    with pytest.raises(UserError, match="must be a folder that only you may enter"):
        private_directory(theirs)


def test_keeper_lives_while_its_lock_is_held(temporary: Path) -> None:
    folder = FleetFolder.of(temporary / "state")
    assert not folder.keeper_lives()
    with hold(folder.keeper_lock):
        assert folder.keeper_lives()
    assert not folder.keeper_lives()


def test_emptied_folder_is_noticed(temporary: Path) -> None:
    folder = FleetFolder.of(temporary / "state")
    with Lock(folder.leases_lock) as lock:
        assert lock.in_place()
        folder.leases_lock.unlink()
        assert not lock.in_place()
        folder.leases_lock.touch()
        assert not lock.in_place()


def test_files_of_the_folder_are_replaced_whole(temporary: Path) -> None:
    folder = FleetFolder.of(temporary / "state")
    assert folder.read(folder.fleet) == {}
    folder.write(folder.fleet, {"servers": [1]})
    folder.write(folder.fleet, {"servers": []})
    assert folder.read(folder.fleet) == {"servers": []}
    assert sorted(path.name for path in folder.directory.iterdir()) == ["fleet.json"]


def test_tickets_of_the_dead_are_removed(tmp_path: Path) -> None:
    first, second = Ticket(tmp_path / "lane"), Ticket(tmp_path / "lane")
    dead = tmp_path / "lane" / "123.abc"
    dead.touch()
    assert tickets.live(tmp_path) == sorted([first.path.name, second.path.name])
    assert not dead.exists()
    first.give_back()
    assert tickets.live(tmp_path) == [second.path.name]
    second.give_back()
    assert tickets.live(tmp_path) == tickets.live(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "left",
    [
        b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"{}", b'{"servers": null}', b'{"servers": [1]}', b'{"keeper": 1, "sign',
        b'{"keeper": 1, "signature": "a", "servers": [{"index": 0}]}', b'{"keeper": {}, "signature": [], "servers": {}}',
        b"\0" * 300,
    ],
)  # fmt: skip
def test_what_a_power_cut_left_of_the_fleet_file_counts_as_nothing(temporary: Path, left: bytes) -> None:
    folder = FleetFolder.of(temporary / "state")
    folder.fleet.write_bytes(left)
    assert folder.published() is None
    folder.remove(folder.fleet)
    assert not folder.fleet.exists()


def test_what_lies_under_the_name_of_a_file_is_taken_away(temporary: Path) -> None:
    folder = FleetFolder.of(temporary / "state")
    (folder.fleet / "inner").mkdir(parents=True)
    assert folder.published() is None
    folder.remove(folder.fleet)
    folder.fleet.symlink_to(folder.fleet)
    assert folder.published() is None
    folder.remove(folder.fleet)
    folder.remove(folder.fleet)
    assert list(folder.directory.iterdir()) == []


def test_a_full_disk_is_named_with_the_file(temporary: Path) -> None:
    folder = FleetFolder.of(temporary / "state")
    (folder.directory / f".launch.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        folder.write(folder.launch, {})
    assert explain(caught.value).startswith(f"{folder.launch}: the disk is full")


def test_a_file_in_the_way_of_the_folder_is_named(temporary: Path) -> None:
    (temporary / f"drafter-corpus-{os.getuid()}").touch()
    with pytest.raises(UserError, match=r"drafter-corpus-\d+: must be a folder that only you may enter"):
        FleetFolder.of(temporary / "state")


def test_jobs_meet_in_tmpdir_however_full_it_is(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile._os, "write", full)  # what tempfile tries a folder with
    assert FleetFolder.of(temporary / "state").directory.is_relative_to(temporary)
    monkeypatch.setenv("TMPDIR", str(temporary / "of a job that is over"))
    monkeypatch.setenv("TMP", str(temporary))
    assert FleetFolder.of(temporary / "state").directory.is_relative_to(temporary)
