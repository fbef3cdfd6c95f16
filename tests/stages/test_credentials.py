"""No credential that a job knows leaves it but in its header, whatever a server echoes."""

import os
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.fault_server.answers import Answers
from tests.generation import Run, generated, prompts, servers, target_folder

KEY, HUB = "sk-or-v1-0123/abc+def", "hf_hubsecret0123456789"


def everything_written(folder: Path) -> str:
    """The text of all files, and of the cells of Parquet files, which compress theirs."""
    texts = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name.startswith("served-"):  # the server's own log
            continue
        texts.append(path.read_bytes().decode("utf-8", "replace"))
        if path.suffix == ".parquet":
            file = pq.ParquetFile(path)
            texts.append(str(file.read().to_pylist()) + str(file.schema_arrow.metadata))
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ("", 0),
        ("400_echo=0.3", 0),
        ("502_echo=0.3", 0),
        ("answer_echo=0.5", 0),
        ("stream_echo=0.5", 0),
        ("401_echo=1", 1),
        ("307_echo=1", 1),
        ("400_echo=1", 1),
    ],
)
def test_nothing_that_is_written_said_or_listed_holds_a_credential(faults: str, code: int, tmp_path: Path) -> None:
    with servers(tmp_path, 1, Answers(13), dialect="openrouter", target=target_folder(), faults=faults) as fleet:
        run = Run(
            tmp_path,
            prompts(40),
            [fleet[0].url + "/v1"],
            kind="openai",
            answers=Answers(13),
            config={
                "engine": {"api_key_env": "SOME_NAME"},
                "transport": {"outage_seconds": 2.0, "attempts": 2, "backoff_first": 0.01, "ramp_per_second": 1000},
            },
        )
        home = tmp_path / "home"
        home.mkdir()
        (home / ".netrc").write_text("default login anna password netrc-password-1\n")
        job = run.start(env={**os.environ, "SOME_NAME": KEY, "HF_TOKEN": HUB, "HOME": str(home)})
        listed = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert job.wait(120) == code, run.log()
        assert code or generated(fleet)
        (home / ".netrc").unlink()
        written = everything_written(tmp_path) + listed
        for credential in (KEY, KEY.replace("/", "%2F").replace("+", "%2B"), HUB, "netrc-password", "0123/abc+def"):
            assert credential not in written
        if faults:
            assert "[redac" in written
