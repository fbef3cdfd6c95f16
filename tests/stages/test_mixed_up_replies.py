"""A hosted API that sends replies twice, late or to the wrong request: every row holds its own prompt's answer."""

from pathlib import Path

import pytest

from scripts.lib.core.records import Message
from tests.certificates import certificate
from tests.fault_server.answers import Answers
from tests.generation import Run, prompts, servers, target_folder


@pytest.mark.parametrize("kind", ["openai", "sglang", "vllm", "llamacpp"])
@pytest.mark.parametrize("tls", [pytest.param(False, id="plain"), pytest.param(True, id="TLS", marks=pytest.mark.slow)])
@pytest.mark.parametrize("faults", ["reply_doubled=0.5", "reply_doubled_late=0.5", "replies_swapped=0.3"])
def test_every_row_holds_its_own_answer(
    faults: str, tls: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate()[0]))
    options = {"target": target_folder(), "tls": ",".join(map(str, certificate())) if tls else None}
    dialect = "openrouter" if kind == "openai" else kind
    with servers(tmp_path, 1, Answers(10), dialect=dialect, faults=faults, tokens_per_second=2000, **options) as fleet:
        url = fleet[0].url + ("/v1" if kind == "openai" else "")
        rows = prompts(60)
        if "swapped" in faults and kind == "openai":
            # Two replies without ids to prompts of one length, swapped by the server itself: nothing tells them apart.
            for number, row in enumerate(rows, 50):  # longer than the canary
                row.messages = [Message("user", "river " * number)]
        run = Run(tmp_path, rows, [url], kind=kind, answers=Answers(10), concurrency=4)
        assert run.finish() == 0, run.log()
        assert run.check().total() == 60
