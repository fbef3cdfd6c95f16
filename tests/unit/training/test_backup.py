import errno
import hashlib
import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from scripts.lib.core import durable, locks
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import canonical_json
from scripts.lib.stores import open_store
from scripts.lib.training import versions
from scripts.lib.training.backup import all_backups, back_up, copy_elsewhere, fetch, names_elsewhere, restore
from scripts.lib.training.verify import verify
from tests.corpora import bytes_of, config, corpus, shards


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

        def merge(self, seed, datasets=("alpha", "beta"), rows=20, **settings):
            shutil.rmtree(tmp_path / "validated", ignore_errors=True)
            paths = shards(tmp_path / "validated", rows, datasets)
            return corpus(tmp_path, config(datasets, seed=seed, rows_per_part=50, **settings), paths)

        def back_up(self, keep=5, hard_links=False):
            return back_up(self.training, self.backups, keep, self.said.append, self.clock, hard_links)

        def restore(self, name):
            return restore(self.training, self.backups, name, self.said.append)

        def names(self):
            return [one.name for one in all_backups(self.backups)]

    return Place()


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("links", [True, False])
def test_a_backup_restores_byte_for_byte(place, monkeypatch, links, hard_links):
    if not links:  # as on two file systems, or one without hard links

        def refused(*arguments, **options):
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refused)
    place.merge(0)
    before = bytes_of(place.training)
    made = place.back_up(hard_links=hard_links)
    place.merge(1)
    assert bytes_of(place.training) != before
    place.restore(made.name)
    assert bytes_of(place.training) == before
    assert verify(place.training)[1] == []


def flip_a_bit(path):
    """In place, as a failing disk or a careless program does."""
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(200)
        byte = file.read(1)[0]
        file.seek(200)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_of_the_corpus_is_not_in_its_backup(place):
    place.merge(0)
    before = bytes_of(place.training)
    made = place.back_up()
    flip_a_bit(place.training / "part-00000.parquet")
    assert bytes_of(place.training) != before
    place.restore(made.name)
    assert bytes_of(place.training) == before
    # And the restored corpus shares nothing with the backup either.
    flip_a_bit(place.training / "part-00000.parquet")
    place.restore(made.name)
    assert bytes_of(place.training) == before


def test_hard_links_on_request_cost_no_space(place):
    place.merge(0)
    made = place.back_up(hard_links=True)
    part = "part-00000.parquet"
    assert (place.backups / made.name / part).samefile(place.training / part)
    # A backup from a time of links becomes one of copies.
    place.back_up()
    assert not (place.backups / made.name / part).samefile(place.training / part)
    assert verify(place.backups / made.name)[1] == []


def test_a_full_disk_is_foreseen(place, monkeypatch):
    place.merge(0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(durable, "can_reflink", lambda source, folder: False)
    with pytest.raises(
        UserError, match=r"the copy of the corpus \(backup\.hard_links: true needs none\) needs .* GB free"
    ):
        place.back_up()
    assert place.names() == []
    assert place.back_up(hard_links=True)


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
    assert copy.read_bytes() == (place.training / "part-00000.parquet").read_bytes()


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


@pytest.mark.parametrize("keep", [1, 2])
def test_the_largest_and_the_last_of_a_lineage_are_never_rotated_away(place, keep):
    place.merge(0, rows=40)
    largest = place.back_up(keep).name
    place.merge(0, rows=25)
    last_with_beta = place.back_up(keep).name
    others = []
    for seed in range(1, 5):
        place.merge(seed, ("alpha",), rows=25, may_shrink=True)
        others.append(place.back_up(keep).name)
    assert place.names() == [largest, last_with_beta, *others[-keep:]]


def test_backups_of_the_future_push_out_no_real_ones(place):
    place.merge(0)
    first = place.back_up().name
    for year in (2098, 2099):
        planted = f"{year}0101T000000Z-{first[-16:]}"
        shutil.copytree(place.backups / first, place.backups / planted)
        record = json.loads((place.backups / planted / "backup.json").read_text())
        durable.write_json(place.backups / planted / "backup.json", record | {"name": planted})
    made = []
    for seed in (1, 2):
        place.merge(seed)
        made.append(place.back_up(keep=2).name)
    assert [name for name in place.names() if name < "2098"] == made


def test_odd_records_block_nothing_and_are_left_alone(place):
    place.merge(0)
    good = place.back_up().name
    odd = {
        "list": "[]",
        "empty": "",
        "20250101T000000Z-0123456789abcdef": '{"name": 1}',
        "renamed": (place.backups / good / "backup.json").read_text(),
    }
    for name, text in odd.items():
        (place.backups / name).mkdir()
        (place.backups / name / "backup.json").write_text(text)
    (place.backups / "pipe").mkdir()
    os.mkfifo(place.backups / "pipe/backup.json")
    place.merge(1)
    made = place.back_up(keep=1).name
    assert place.names() == [made]
    assert sorted(path.name for path in place.backups.iterdir()) == sorted([made, "pipe", *odd])
    told = [line for line in place.said if line.endswith(": left alone")]
    assert len(told) == len(odd) + 1
    assert any(f"renamed/backup.json: is that of {good}: name the folder so again" in line for line in told)
    with pytest.raises(UserError, match=r"list/backup\.json: not the record of a backup of ours"):
        place.restore("list")


def tampered(place, change):
    """A backup whose manifest says something else, sealed by somebody who knows how."""
    place.merge(0)
    made = place.back_up()
    folder = place.backups / made.name
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    values["seal"] = hashlib.sha256(canonical_json({k: v for k, v in values.items() if k != "seal"})).hexdigest()
    durable.write_json(folder / "manifest.json", values)
    return made.name, folder


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["parts"][0].update(file="../victim.txt"),
        lambda values: values["parts"][0].update(file="sub/part-00000.parquet"),
        lambda values: values.update(version="../../escaped"),
        lambda values: values.update(version="0" * 16),
        lambda values: values["parts"][0].update(file="part-00000.parquet/"),
    ],
)
def test_a_tampered_manifest_leads_out_of_no_folder(place, tmp_path, change):
    name, folder = tampered(place, change)
    (folder.parent / "victim.txt").write_bytes((folder / "part-00000.parquet").read_bytes())
    (tmp_path / "corpora/victim.txt").write_text("precious")
    before = bytes_of(place.training)
    with pytest.raises(UserError, match=r"manifest\.json: (not a manifest of ours|is that of another version)"):
        place.restore(name)
    assert (tmp_path / "corpora/victim.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backups", "corpora", "training", "validated"]
    assert bytes_of(place.training) == before


def test_links_lead_nowhere(place, tmp_path):
    place.merge(0)
    before = bytes_of(place.training)
    version = place.training.resolve()
    made = place.back_up()
    # A part that is a link in the backup becomes a file of its own.
    part = place.backups / made.name / "part-00000.parquet"
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    shutil.rmtree(version)
    place.restore(made.name)
    assert not (place.training / "part-00000.parquet").is_symlink()
    assert bytes_of(place.training) == before
    # A version that is a link is not written through.
    (tmp_path / "outside").mkdir()
    shutil.rmtree(version)
    version.symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is a link, which leads elsewhere"):
        place.restore(made.name)
    assert list((tmp_path / "outside").iterdir()) == []
    # A part that is a folder or a pipe is damage, not a traceback or an endless read.
    version.unlink()
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(UserError, match=r"part-00000\.parquet: is not a file"):
        place.restore(made.name)


def test_a_folder_where_the_corpus_should_be_is_left_alone(place):
    place.merge(0)
    made = place.back_up()
    place.training.unlink()
    place.training.mkdir()
    with pytest.raises(UserError, match="training: is not a link to a corpus version: move it away"):
        place.restore(made.name)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_manifest_that_is_a_device_is_not_read(place, device):
    place.merge(0)
    made = place.back_up()
    path = place.backups / made.name / "manifest.json"
    path.unlink()
    path.symlink_to(device)
    with pytest.raises(UserError, match=r"manifest\.json: is not a file"):
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


def test_other_peoples_folders_elsewhere_are_neither_listed_nor_removed(place, elsewhere, tmp_path):
    for name in ("project", "..x", "20260101T000001Z-0123456789abcdeF"):
        (tmp_path / "other-disk" / name).mkdir(parents=True)
        (tmp_path / "other-disk" / name / "backup.json").write_text("{}")
    for seed in range(2):
        place.merge(seed)
        made = place.back_up()
        copy_elsewhere(place.backups, made, elsewhere, 1, place.said.append)
    assert names_elsewhere(elsewhere) == [made.name]
    assert (tmp_path / "other-disk/project/backup.json").read_text() == "{}"


def test_a_tampered_copy_elsewhere_writes_nothing_outside(place, elsewhere, tmp_path):
    place.merge(0)
    made = place.back_up()
    copy_elsewhere(place.backups, made, elsewhere, 2, place.said.append)
    path = tmp_path / "other-disk" / made.name / "manifest.json"
    values = json.loads(path.read_text())
    values["parts"][0]["file"] = "../../escaped.parquet"
    path.write_text(json.dumps(values))
    shutil.rmtree(place.backups)
    with pytest.raises(UserError, match=r"not a manifest of ours: parts\.0\.file"):
        fetch(elsewhere, made.name, place.backups, place.said.append)
    assert not [*tmp_path.glob("escaped*"), *place.backups.iterdir()]
