"""sglang-router as the one endpoint in front of servers: ids exact, a server may die, and chat is refused."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from scripts import prepare_target
from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.fleet.lease import lease
from scripts.lib.fleet.ports import Ports
from tests.fault_server.answers import Answers
from tests.generation import Run, prompts, servers

pytestmark = pytest.mark.engines


@contextlib.contextmanager
def router(environment: Path, log: Path, workers: list[str]) -> Iterator[str]:
    """A router in front of `workers`; yields its URL once it knows all of them."""
    ports = Ports(log.parent)
    port = ports.take()
    url = f"http://127.0.0.1:{port}"
    command = [environment / "bin" / "python", "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    options = ["--port", str(port), "--prometheus-port", str(ports.take()), "--policy", "round_robin"]
    with open(log, "wb") as output:
        process = subprocess.Popen([*command, *options, "--worker-urls", *workers], stdout=output, stderr=output)
    try:
        end = time.monotonic() + 60
        while not ready(url, len(workers)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def ready(url: str, workers: int) -> bool:
    with contextlib.suppress(requests.RequestException):
        found = requests.get(f"{url}/workers", timeout=5)
        known = found.json()["workers"] if found.ok else []
        return sum(worker["is_healthy"] for worker in known) == workers
    return False


def test_ids_come_through_the_router(router_environment: Path, tmp_path: Path) -> None:
    with (
        servers(tmp_path, 2, Answers(21), dialect="sglang") as fleet,
        router(router_environment, tmp_path / "router.log", [server.url for server in fleet]) as url,
    ):
        run = Run(tmp_path, prompts(40, turns=2), [url], kind="sglang", answers=Answers(21))
        assert run.finish(120) == 0, run.log()
        assert run.check().total() == 40
        served = [server.served() for server in fleet]
        assert all(len(lines) > 20 for lines in served)
        # The seed of each turn reaches the server: the router keeps our sampling parameters.
        sent = {turn.seed for row in run.completions() for turn in row.turns}
        assert sent <= {line["seed"] for lines in served for line in lines}


def test_a_server_behind_the_router_may_die(router_environment: Path, tmp_path: Path) -> None:
    with (
        servers(tmp_path, 2, Answers(22), dialect="sglang", die_after=[15, None]) as fleet,
        router(router_environment, tmp_path / "router.log", [server.url for server in fleet]) as url,
    ):
        run = Run(tmp_path, prompts(80), [url], kind="sglang", concurrency=8, answers=Answers(22))
        assert run.finish(120) == 0, run.log()
        assert fleet[0].process.poll() is not None
        assert run.check().total() == 80


def test_only_native_ids_come_through_to_a_real_sglang(
    sglang_settings: dict, router_environment: Path, tmp_path: Path
) -> None:
    """Chat gives exact ids without the router. Behind it the job stops at its first question, before any prompt."""
    durable.write_json(tmp_path / "config.json", sglang_settings)
    arguments = ["--config", str(tmp_path / "config.json"), "--output", str(tmp_path / "target")]
    assert prepare_target.main(arguments) == 0
    with lease(load_config(tmp_path / "config.json"), tmp_path / "target", tmp_path / "state", "short") as held:
        server = held.endpoints()[0].url
        with router(router_environment, tmp_path / "router.log", [server]) as routed:

            def job(name: str, url: str, api: str) -> tuple[Run, int]:
                engine = {"api": api, "served_model": sglang_settings["model"]["name"]}
                patience = {"min_tokens_per_second": 1, "base_seconds": 120, "idle_seconds": 120}
                config = {"engine": engine, "transport": patience}
                run = Run(tmp_path / name, prompts(8), [url], kind="sglang", max_tokens=16, config=config)
                return run, run.finish(300)

            exact = [job("native", routed, "native"), job("chat", server, "chat")]
            refused, refusal = job("refused", routed, "chat")
    for run, code in exact:
        assert code == 0, run.log()
        for row, prompt in zip(run.completions(), run.rows, strict=True):
            [turn] = row.turns
            assert (row.id, row.outcome) == (prompt.id, "ok" if turn.finish_reason == "stop" else "length")
            assert (turn.prompt_ids, turn.ids_origin) == (run.target.render(prompt.messages), "engine")
            assert len(turn.output_ids) == 16 or turn.output_ids[-1] in run.target.eos_ids
    assert refusal == 1
    assert "the server returns no token ids: set engine.api to native" in refused.log()
    assert refused.journalled() == set()
