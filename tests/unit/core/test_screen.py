import re
import subprocess
import sys

import pytest

from scripts.lib.core.command import say
from scripts.lib.core.errors import UserError, entry
from scripts.lib.core.screen import visible, visible_line

STEERING = [
    *(chr(code) for code in range(0x20) if chr(code) not in "\t\n"),
    *(chr(code) for code in range(0x7F, 0xA0)),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800\udfff\U000e0041",
]


@pytest.mark.parametrize("sign", STEERING, ids=lambda sign: f"U+{ord(sign):04X}")
def test_what_steers_terminals_is_shown(sign):
    shown = visible(f"a{sign}b")
    assert sign not in shown
    assert re.fullmatch(r"a([\u2400-\u2421]|<U\+[0-9A-F]{4,5}>)b", shown)


@pytest.mark.parametrize(
    "text", ["", "a\tb\nc", "où «x» ⟦y⟧", "中文 العربية עברית", "👩‍🚀 zero width joiners", "\\x1b[2J"]
)
def test_what_does_not_stays(text):
    assert visible(text) == text


def test_known_attacks():
    assert visible("\x1b]0;title\x07") == "␛]0;title␇"
    assert visible("\x9b2J\x1b[2J") == "<U+009B>2J␛[2J"
    assert visible("\x1b]52;c;ZWNobw==\x1b\\") == "␛]52;c;ZWNobw==␛\\"
    assert visible("100%\rdone\x08\x08") == "100%␍done␈␈"
    assert visible("access \u202egrant\u202c") == "access <U+202E>grant<U+202C>"


def test_a_heading_stays_one_line():
    assert visible_line("a\nb\tc\x1b") == "a␊b␉c␛"


def test_lines_and_errors_of_entries_hold_no_escapes(capsys):
    say("reading \x1b[2J.jsonl")

    @entry
    def main(argv=None):
        raise UserError("data/\x9b\x1b]0;x\x07.jsonl: no such file")

    assert main([]) == 1
    assert capsys.readouterr().err == "reading ␛[2J.jsonl\nerror: data/<U+009B>␛]0;x␇.jsonl: no such file\n"


def test_a_file_name_of_an_entrys_argument():
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.verify_training", "--training", "no\x1b]0;x\x07where"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "\x1b" not in ended.stdout + ended.stderr
