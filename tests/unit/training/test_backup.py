import errno
import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from scripts.lib.core import locks
from scripts.lib.core.errors import UserError
from scripts.lib.stores import open_store
from scripts.lib.training import versions
from scripts.lib.training.backup import all_backups, back_up, copy_elsewhere, fetch, names_elsewhere, restore
from scripts.lib.training.verify import verify
from tests.corpora import bytes_of, config, corpus


class Clock:
    """A second later each time."""

    def __init__(self):
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self):
        self.time += timedelta(seconds=1)
        return self.time


@pytest.fixture
def place(tmp_path):
    """`place.merge(seed)`, `place.back_up(keep)`, `place.restore(name)` on one results folder."""

    class Place:
        def __init__(self):
            self.training = tmp_path / "training"
            self.backups = tmp_path / "backups"
            self.clock = Clock()
            self.said = []

        def merge(self, seed):
            return corpus(tmp_path, config(seed=seed, rows_per_part=50))

        def back_up(self, keep=5):
            return back_up(self.training, self.backups, keep, self.said.append, self.clock)

        def restore(self, name):
            return restore(self.training, self.backups, name, self.said.append)

        def names(self):
            return [one.name for one in all_backups(self.backups)]

    return Place()


@pytest.mark.parametrize("links", [True, False])
def test_a_backup_restores_byte_for_byte(place, monkeypatch, links):
    if not links:  # as on two file systems, or one without hard links

        def refused(*arguments, **options):
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refused)
    place.merge(0)
    before = bytes_of(place.training)
    made = place.back_up()
    place.merge(1)
    assert bytes_of(place.training) != before
    place.restore(made.name)
    assert bytes_of(place.training) == before
    assert verify(place.training)[1] == []


def test_backups_cost_no_space_where_links_work(place):
    place.merge(0)
    made = place.back_up()
    part = "part-00000.parquet"
    assert (place.backups / made.name / part).samefile(place.training / part)


def test_no_corpus_yet(place):
    assert place.back_up() is None
    assert place.said == [f"backup: no corpus yet at {place.training}: nothing to save"]


def test_the_same_version_is_kept_once_and_old_versions_leave(place):
    first = place.merge(0)
    assert place.back_up() == place.back_up()
    second = place.merge(1)
    assert [path.name for path in versions.all_versions(place.training)] == sorted([first.version, second.version])
    place.back_up()
    assert [path.name for path in versions.all_versions(place.training)] == [second.version]
    assert len(place.names()) == 2


def test_a_version_without_a_backup_is_never_removed(place):
    first, second = place.merge(0), place.merge(1)
    place.back_up()
    assert [path.name for path in versions.all_versions(place.training)] == sorted([first.version, second.version])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_keeps_the_newest(place, keep):
    made = []
    for seed in range(4):
        place.merge(seed)
        made.append(place.back_up(keep).name)
    assert place.names() == made[-keep:]


def test_a_damaged_corpus_replaces_no_backup(place):
    place.merge(0)
    place.back_up(keep=1)
    place.merge(1)
    part = place.training / "part-00001.parquet"
    part.chmod(0o644)
    part.write_bytes(b"damaged")
    names = place.names()
    with pytest.raises(UserError, match=r"part-00001\.parquet: has 7 bytes.*restore_training"):
        place.back_up(keep=1)
    assert place.names() == names
    place.restore(names[0])
    assert verify(place.training)[1] == []


def test_a_damaged_copy_is_made_good_again(place):
    place.merge(0)
    made = place.back_up()
    copy = place.backups / made.name / "part-00000.parquet"
    copy.unlink()
    copy.write_bytes(b"damaged")
    assert place.back_up() == made
    assert copy.samefile(place.training / "part-00000.parquet")


def test_a_damaged_backup_changes_nothing(place):
    place.merge(0)
    made = place.back_up()
    place.merge(1)
    before = bytes_of(place.training)
    (place.backups / made.name / "part-00000.parquet").unlink()
    with pytest.raises(
        UserError, match=r"part-00000\.parquet: no such file.*the backup is damaged, nothing was changed"
    ):
        place.restore(made.name)
    assert bytes_of(place.training) == before


def test_restoring_mends_a_damaged_version(place):
    place.merge(0)
    made = place.back_up()
    before = bytes_of(place.training)
    (place.training / "part-00001.parquet").unlink()
    place.restore(made.name)
    assert bytes_of(place.training) == before


def test_a_backup_stays_after_results_of_the_corpus_are_gone(place, tmp_path):
    place.merge(0)
    made = place.back_up()
    before = bytes_of(place.training)
    shutil.rmtree(tmp_path / "corpora")
    place.training.unlink()
    place.restore(made.name)
    assert bytes_of(place.training) == before


@pytest.mark.parametrize("name", ["nothing", "", "..", "../backups"])
def test_unknown_backups_are_told_with_those_there_are(place, name):
    place.merge(0)
    made = place.back_up()
    with pytest.raises(UserError, match=f"there is no backup '{name}'; there are: {made.name}"):
        place.restore(name)


def test_a_second_writer_is_refused_and_told_who_the_first_is(place, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    place.merge(0)
    made = place.back_up()
    with versions.writer(place.training):
        with pytest.raises(UserError, match=f"training is being written by process {os.getpid()} on "):
            place.back_up()
        with pytest.raises(UserError, match=f"training is being written by process {os.getpid()} on "):
            place.restore(made.name)


@pytest.fixture
def elsewhere(tmp_path):
    return open_store(str(tmp_path / "other-disk"))


def test_a_copy_elsewhere_outlives_everything_here(place, elsewhere, tmp_path):
    place.merge(0)
    before = bytes_of(place.training)
    made = place.back_up()
    copy_elsewhere(place.backups, made, elsewhere, 3, place.said.append)
    shutil.rmtree(tmp_path / "corpora")
    shutil.rmtree(place.backups)
    place.training.unlink()
    assert names_elsewhere(elsewhere) == [made.name]
    fetch(elsewhere, made.name, place.backups, place.said.append)
    place.restore(made.name)
    assert bytes_of(place.training) == before


def test_copies_elsewhere_are_rotated(place, elsewhere):
    names = []
    for seed in range(3):
        place.merge(seed)
        made = place.back_up()
        copy_elsewhere(place.backups, made, elsewhere, 2, place.said.append)
        names.append(made.name)
    assert names_elsewhere(elsewhere) == names[1:]
    assert elsewhere.keys(names[0]) == []


def test_a_damaged_copy_elsewhere_is_not_taken(place, elsewhere, tmp_path):
    place.merge(0)
    made = place.back_up()
    copy_elsewhere(place.backups, made, elsewhere, 2, place.said.append)
    part = tmp_path / "other-disk" / made.name / "part-00000.parquet"
    part.write_bytes(b"damaged")
    shutil.rmtree(place.backups)
    with pytest.raises(UserError, match=r"part-00000\.parquet: has 7 bytes.*is damaged: choose another one"):
        fetch(elsewhere, made.name, place.backups, place.said.append)
    assert place.names() == []
    with pytest.raises(UserError, match=f"there is no backup 'x'; there are: {made.name}"):
        fetch(elsewhere, "x", place.backups, place.said.append)
