"""Mistakes of the user are one line and exit code 1; interrupts end quietly."""

import errno

import pytest

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError, entry
from scripts.lib.core.provenance import differences, digest


def test_user_errors_are_one_line(capsys):
    @entry
    def main(argv):
        raise UserError("a.jsonl:3: not JSON")

    assert main([]) == 1
    assert capsys.readouterr().err == "error: a.jsonl:3: not JSON\n"


def test_a_full_disk_is_one_line(capsys):
    @entry
    def main(argv):
        raise OSError(errno.ENOSPC, "No space left on device", "results/x.parquet")

    assert main([]) == 1
    assert capsys.readouterr().err == (
        "error: results/x.parquet: the disk is full: free some space and run again, nothing is lost\n"
    )


@pytest.mark.parametrize(
    ("code", "says"), [(errno.EROFS, "read-only file system"), (errno.EACCES, "permission denied")]
)
def test_a_place_that_may_not_be_written_is_one_line(capsys, code, says):
    @entry
    def main(argv):
        raise OSError(code, "as the system says it", "results/x.parquet")

    assert main([]) == 1
    assert capsys.readouterr().err == (
        f"error: results/x.parquet: {says}: make it accessible and run again, nothing is lost\n"
    )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("file/x.json", "file: file exists"),
        ("file/x/x.json", "file/x: not a directory"),
        ("folder", "folder: is a directory"),
        ("x" * 300, "x" * 300 + ": file name too long"),
        ("loop/x", "loop: file exists"),
    ],
)
def test_something_else_in_the_place_of_a_file_is_one_line(tmp_path, capsys, path, says):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    @entry
    def main(argv):
        durable.write_json(tmp_path / path, {})

    assert main([]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/{says}: mend that and run again, nothing is lost\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EPERM, "of no file"), OSError("of no number")])
def test_other_errors_keep_their_traceback(error):
    @entry
    def main(argv):
        raise error

    with pytest.raises(type(error)):
        main([])


def test_interrupt_and_success():
    @entry
    def main(argv):
        if argv:
            raise KeyboardInterrupt

    assert main(["x"]) == 130
    assert main([]) == 0


def test_differences_name_the_field():
    old = {"sampling": {"temperature": 0.7, "seed": 0}, "model": "a"}
    new = {"sampling": {"temperature": 1.0, "seed": 0}, "lane": 1}
    assert differences(old, new) == ["lane: None -> 1", "model: 'a' -> None", "sampling.temperature: 0.7 -> 1.0"]


def test_digest_does_not_depend_on_key_order():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
