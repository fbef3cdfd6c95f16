"""Lines for people reach them whole, and a reader that has gone is no error."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SPEAKER = """
import sys, threading
from scripts.lib.core.command import say
threads = [threading.Thread(target=lambda n=n: [say(f"{n}" * 40) for _ in range(200)]) for n in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done")
"""


def test_threads_do_not_mix_their_lines() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKER], cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(set(done.stderr.splitlines())) == [str(number) * 40 for number in range(4)]
    assert len(done.stderr.splitlines()) == 800


def test_a_reader_that_has_gone_does_not_stop_the_work() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", SPEAKER], cwd=ROOT, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    assert done.stdout == "done\n"
