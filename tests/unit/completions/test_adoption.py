"""Finished shards that only lie where declared outputs do are kept, each once."""

import shutil

from scripts.lib.completions.adoption import adopt
from scripts.lib.core.paths import Results
from scripts.lib.core.records import Completion, write_rows


def test_a_shard_gets_a_name_in_the_state_folder_unless_it_has_one(tmp_path):
    results = Results(tmp_path)
    declared, kept = results.shard("completions", "chat", "000"), results.state.finished("chat", "000")
    write_rows(declared, Completion, [Completion("a" * 32, "chat", "ok")], {"identity": {}})
    assert adopt(results) == [kept]
    assert kept.samefile(declared)
    assert adopt(results) == []


def test_another_shard_under_the_same_name_is_kept_beside_it_and_a_copy_is_not(tmp_path):
    results = Results(tmp_path)
    declared, kept = results.shard("completions", "chat", "000"), results.state.finished("chat", "000")
    write_rows(kept, Completion, [Completion("a" * 32, "chat", "ok")], {"identity": {}})
    declared.parent.mkdir(parents=True)
    shutil.copyfile(kept, declared)  # as on another file system
    assert adopt(results) == []
    write_rows(declared, Completion, [Completion("b" * 32, "chat", "ok")], {"identity": {"older": 1}})
    (older,) = adopt(results)
    assert older.parent == kept.parent
    assert older.samefile(declared)
    assert adopt(results) == []


def test_what_is_no_shard_is_left_alone_beside_a_known_one(tmp_path):
    results = Results(tmp_path)
    declared, kept = results.shard("completions", "chat", "000"), results.state.finished("chat", "000")
    write_rows(kept, Completion, [], {})
    declared.parent.mkdir(parents=True)
    declared.write_bytes(b"half a fi")
    assert adopt(results) == []
