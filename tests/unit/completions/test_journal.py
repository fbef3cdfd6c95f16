"""The journal: what was appended comes back, whatever a crash or a full disk did to the file."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.lib.completions import generate
from scripts.lib.completions import journal as journal_module
from scripts.lib.completions.journal import Journal, decode, encode, scan
from scripts.lib.completions.journal_records import Done, Header, Proven, TurnDone, TurnPart, Void
from scripts.lib.core.errors import UserError

IDENTITY = {"sampling": {"temperature": 0.7}}


def opened(path: Path, identity: dict = IDENTITY, patience: float = 0.0) -> tuple[Journal, list]:
    """A journal ready for appending, and the records that it holds."""
    held: list = []
    journal = Journal(path, identity, "shard x/000", patience)
    journal.recover(lambda offset, record, body: held.append(record))
    journal.begin()
    return journal, held


words, counts = st.text(max_size=20), st.integers(0, 2**40)
RECORDS = st.one_of(
    st.builds(Header),
    st.builds(Done, words, words, counts, counts, st.floats(0, 1e6), words, st.none() | counts, words),
    st.builds(TurnDone, words, words),
    st.builds(TurnPart, words, words),
    words.map(Void),
    st.builds(Void, words, words, counts, counts, st.floats(0, 1e6), st.none() | counts, words),
    st.builds(Proven, words, counts),
)


@given(RECORDS, st.dictionaries(st.text(max_size=5), st.text(max_size=50)))
def test_a_line_is_read_as_it_was_written(record, body):
    line = encode(record, body)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    read = decode(line)
    assert read is not None
    assert (read[0], type(read[0]), orjson.loads(read[1])) == (record, type(record), body)


@given(st.integers(min_value=0), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position, change):
    line = bytearray(encode(Done("a", "ok"), {"text": "ünïcode", "ids": [1, 2, 3]}))
    line[position % len(line)] ^= change
    assert decode(bytes(line)) is None or bytes(line).lower() == encode(
        Done("a", "ok"), {"text": "ünïcode", "ids": [1, 2, 3]}
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(cut=st.integers(min_value=0))
def test_cut_anywhere_the_whole_records_survive_and_appending_goes_on(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "000.journal"
    journal, _ = opened(path)
    for number in range(5):
        journal.append(Done(f"id{number}", "ok"), {"ids": list(range(number))})
    journal.close()
    whole = path.read_bytes()
    kept = cut % (len(whole) + 1)
    os.truncate(path, kept)
    expected = [decode(line)[0] for line in whole[:kept].splitlines(keepends=True) if line.endswith(b"\n")]

    journal, held = opened(path)
    assert held == [record for record in expected if not isinstance(record, Header)]
    journal.append(Done("new", "ok"), None)
    journal.close()
    assert [line.record for line in scan(path)][-1] == Done("new", "ok")
    assert all(line.record is not None for line in scan(path))


def test_records_of_before_are_read_and_those_of_another_program_count_as_damaged():
    """Journals of earlier versions name no endpoint; a later version's kinds can't be understood."""
    assert decode(lines(["done", "a", "ok", 3, 11, 0.5]))[0] == Done("a", "ok", 3, 11, 0.5)
    assert decode(lines(["turn", "a"]))[0] == TurnDone("a")
    assert decode(lines(["void", "a"]))[0] == Void("a")
    for strange in (["seen", "a"], ["done"], ["proven", "a", 1, 2], [], {}, None):
        assert decode(lines(strange)) is None


def lines(written) -> bytes:
    line = b"%b\tnull" % orjson.dumps(written)
    return b"%08x\t%b\n" % (zlib.crc32(line), line)


def test_a_damaged_line_in_the_middle_loses_only_itself(tmp_path):
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    for name in "abc":
        journal.append(Done(name, "ok"), {"text": name * 40})
    journal.close()
    path.write_bytes(path.read_bytes().replace(b"bbbbb", b"bbXbb", 1))
    journal, held = opened(path)
    assert held == [Done("a", "ok"), Done("c", "ok")]
    assert journal.damaged == 1
    journal.close()


def test_a_record_is_read_at_its_offset(tmp_path):
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    journal.append(Done("a", "ok"), {"n": 1})
    journal.append(Done("b", "ok"), {"n": 2})
    offsets = {line.record.prompt_id: line.begin for line in scan(path) if isinstance(line.record, Done)}
    assert journal.read(offsets["b"]) == b'{"n":2}'
    with pytest.raises(UserError, match="changed while the job ran"):
        journal.read(offsets["b"] + 1)
    journal.close()


def test_a_record_is_in_the_file_as_soon_as_it_is_appended(tmp_path):
    """A kill -9 in the next moment loses nothing that had arrived."""
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    for name in "abc":
        journal.append(Done(name, "ok"), None)
        assert [line.record for line in scan(path)][-1] == Done(name, "ok")
    journal.close()


def test_sync_fsyncs_what_was_appended_and_at_least_every_second(tmp_path, monkeypatch):
    """A power cut costs no more than the last second: README and docs promise it."""
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    fsync, synced = os.fsync, []
    monkeypatch.setattr(journal_module.os, "fsync", lambda file: (fsync(file), synced.append(os.fstat(file).st_size)))
    journal.append(Done("a", "ok"), None)
    journal.sync()
    assert synced == [path.stat().st_size], "Journal.sync fsyncs nothing"
    journal.sync()
    assert len(synced) == 1
    journal.close()
    assert generate._SAVE_SECONDS <= 1.0, "the journal is fsynced less often than every second"


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path):
    first, _ = opened(tmp_path / "000.journal")
    with pytest.raises(UserError, match=rf"shard x/000 is being written by process {os.getpid()}"):
        Journal(tmp_path / "000.journal", IDENTITY, "shard x/000", 0.0)
    first.close()
    second, _ = opened(tmp_path / "000.journal")
    second.close()


def test_a_writer_in_another_process_is_refused_until_it_is_killed(tmp_path):
    path = tmp_path / "000.journal"
    code = (
        "import sys, time; from pathlib import Path; from scripts.lib.completions.journal import Journal\n"
        "Journal(Path(sys.argv[1]), {}, 'shard x/000'); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on "):
        Journal(path, IDENTITY, "shard x/000", 0.0)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    journal, _ = opened(path)
    journal.close()


def test_replacing_keeps_the_lock_and_what_is_given(tmp_path):
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    journal.append(Done("a", "ok"), None)
    assert not journal.empty
    journal.replace([encode(TurnDone("b"), {})])
    journal.append(Done("c", "ok"), None)
    journal.close()
    assert [line.record for line in scan(path)] == [Header(), TurnDone("b"), Done("c", "ok")]


def test_without_records_it_is_empty(tmp_path):
    journal, _ = opened(tmp_path / "000.journal")
    assert journal.empty
    journal.append(Done("a", "ok"), None)
    journal.replace([])
    assert journal.empty
    journal.close()


def test_records_without_a_header_are_not_trusted(tmp_path):
    path = tmp_path / "000.journal"
    path.write_bytes(b"garbage\n" + encode(Done("a", "ok"), None))
    with pytest.raises(UserError, match="first line is damaged"):
        opened(path)


def test_a_full_disk_gives_up_the_reserve_and_loses_nothing(tmp_path, monkeypatch):
    """The write fails half done, once: what was half written is cut off, and written again with the reserve's space."""
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    journal.append(Done("a", "ok"), None)
    write, failed = os.write, []

    def full(file, data):
        if not failed:
            failed.append(True)
            write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(journal_module.os, "write", full)
    reserve = path.with_name(".000.journal.reserve")
    assert reserve.stat().st_size > 0
    journal.append(Done("b", "ok"), {"ids": [1] * 100})
    assert not reserve.exists()
    assert "No space left" in str(journal.problem)
    journal.append(Done("c", "ok"), None)
    journal.close()
    assert [line.record for line in scan(path)] == [Header(), Done("a", "ok"), Done("b", "ok"), Done("c", "ok")]


def test_answers_that_a_full_disk_does_not_take_are_counted_not_called_kept(tmp_path, monkeypatch):
    """Of 64 in flight some still fit, the others don't; nobody is told that all were kept."""
    path = tmp_path / "000.journal"
    journal, _ = opened(path)
    write, room = os.write, [700]

    def nearly_full(file, data):
        if len(data) > room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= len(data)
        return write(file, data)

    monkeypatch.setattr(journal_module.os, "write", nearly_full)
    journal.append(Done("big", "ok"), {"ids": [1] * 1000})
    assert "1 answers that had arrived could not be kept, and are asked again" in str(journal.problem)
    journal.append(Done("small", "ok"), None)
    assert "2 answers that had arrived could not be kept" in str(journal.problem)
    room[0] = 10_000  # somebody has freed some
    journal.append(Done("last", "ok"), None)
    assert "what has arrived is kept" in str(journal.problem)
    journal.close()
    assert [line.record for line in scan(path)] == [Header(), *(Done(name, "ok") for name in ("big", "small", "last"))]


def test_a_disk_without_room_for_the_answers_in_flight_is_refused_before_anything_is_paid(tmp_path, monkeypatch):
    left = os.statvfs_result((4096, 4096, 1000, 200, 200, 0, 0, 0, 0, 255))  # 0.8 MB
    monkeypatch.setattr(journal_module.os, "statvfs", lambda path: left)
    with pytest.raises(UserError, match=r"0.8 MB of the disk are free, too little for the answers in flight"):
        opened(tmp_path / "000.journal")
