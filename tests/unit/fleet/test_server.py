"""One server over time, in this process."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest

from scripts.lib.engines.base import Call
from scripts.lib.engines.launching import PORT, ServerPlan
from scripts.lib.engines.llamacpp import LlamaCpp
from scripts.lib.fleet import server
from scripts.lib.fleet.keeper import with_key
from scripts.lib.fleet.ports import Ports
from scripts.lib.fleet.server import Patience, ServerProcess, without_proxy
from tests.stages import toy_server


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "example.org, 10.0.0.1"}, "example.org,10.0.0.1,127.0.0.1,localhost,::1"),
        ({"no_proxy": "localhost,.inside"}, "localhost,.inside,127.0.0.1,::1"),
        ({"NO_PROXY": "a", "no_proxy": "b,a"}, "a,b,127.0.0.1,localhost,::1"),
    ],
)  # fmt: skip
def test_a_server_asks_itself_without_a_proxy(environment: dict[str, str], expected: str) -> None:
    assert without_proxy(environment) == {"NO_PROXY": expected, "no_proxy": expected}


def test_the_first_request_has_the_servers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    call, plain = Call("POST", "/x", b"{}", {"A": "b"}), ["server"]
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert with_key(call, None, plain) == call
    assert with_key(call, "SOME_KEY", plain) == call
    assert with_key(call, None, ["server", "--api-key", "s3"]).headers == {"A": "b", "Authorization": "Bearer s3"}
    monkeypatch.setenv("SOME_KEY", "k1\n")
    assert with_key(call, "SOME_KEY", ["server", "--api-key", "s3"]).headers["Authorization"] == "Bearer k1"


class Toy:
    """A toy server under supervision; what it `does` at its start is told by its environment."""

    def __init__(self, folder: Path, does: str, *, sibling: bool = False, **patience: float) -> None:
        program = folder / "bin" / "toy_server.py"
        program.parent.mkdir()
        program.write_text(Path(toy_server.__file__).read_text())
        self.relapse = program.with_name("relapse")
        settings = {"start_timeout": 600.0, "hang_seconds": 60.0, "crash_budget": 0, **patience}
        self.ready = asyncio.Event()
        if sibling:
            self.ready.set()
        metrics = LlamaCpp.metrics
        assert metrics is not None
        plan = ServerPlan([sys.executable, str(program), "--port", PORT], {"TOY": does})
        call = Call("POST", "/completion", b"{}")
        ports, log = Ports(folder), folder / "server.log"
        self.server = ServerProcess(0, plan, call, metrics, folder, log, Patience(**settings), ports, self.ready)

    async def until(self, *statuses: str) -> None:
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(self.server.supervise(session))
            while self.server.status not in statuses:
                assert not task.done() or self.server.status == "failed", self.server.error
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("refuse401", "refuses its first request: HTTP 401: toy says no: name its key in engine.api_key_env"),
        ("refuse404", "refuses its first request: HTTP 404: toy says no"),
        ("refuse422", "refuses its first request: HTTP 422: toy says no"),
    ],
)
def test_a_server_that_refuses_its_first_request_fails_at_once_with_its_words(
    tmp_path: Path, does: str, says: str
) -> None:
    toy = Toy(tmp_path, does)
    asyncio.run(toy.until("failed"))
    assert says in (toy.server.error or "")


def test_a_server_that_never_becomes_ready_tells_its_last_answer(tmp_path: Path) -> None:
    toy = Toy(tmp_path, "refuse503", start_timeout=1.5)
    asyncio.run(toy.until("failed"))
    assert "was not ready after 2 s (engine.launch.start_timeout); its last answer: HTTP 503: toy says no" in (
        toy.server.error or ""
    )


def test_a_server_that_was_given_up_is_tried_again_while_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_AGAIN_SECONDS", 0.05)
    toy = Toy(tmp_path, "", sibling=True)
    toy.relapse.touch()  # its first start crashes
    asyncio.run(toy.until("ready"))
    assert toy.server.restarts == 1


def test_a_server_that_was_given_up_is_left_alone_when_none_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_AGAIN_SECONDS", 0.0)
    toy = Toy(tmp_path, "")
    toy.relapse.touch()
    asyncio.run(toy.until("failed"))
    assert (toy.server.restarts, toy.ready.is_set()) == (0, False)


def test_a_proxy_in_the_environment_does_not_end_a_server_that_asks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's warm-up does, and kills itself when there is no answer (http_server.py of 0.5.23)."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    toy = Toy(tmp_path, "warm-up")
    asyncio.run(toy.until("ready", "failed"))
    assert toy.server.error is None
