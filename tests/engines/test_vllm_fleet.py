"""A real vLLM under the fleet lease: a whole generation job, abandoned requests, and no process left."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from scripts import generate_completions, prepare_prompts, prepare_target, stop_servers
from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.provenance import PROJECT
from scripts.lib.core.records import Completion, Message, Prompt, read_provenance, read_rows
from scripts.lib.fleet import processes
from scripts.lib.fleet.lease import lease
from scripts.lib.target.model import load_target
from tests.help_options import options, recorded
from tests.stages.test_fleet import until

pytestmark = pytest.mark.engines

MAX_TOKENS = 24


def test_options_are_those_recorded(vllm_environment: Path) -> None:
    """Those of our launches are checked against the record."""
    command = [vllm_environment / "bin" / "vllm", "serve", "--help=all"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert options(done.stdout) == recorded("vllm")


def test_job_is_answered_and_nothing_is_left_behind(
    vllm_settings: dict, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    settings = vllm_settings | {
        "datasets": {"chat": {"class": "B", "source": str(PROJECT / "config/prompts/chat.json")}},
        "lanes": {"short": {"max_tokens": MAX_TOKENS, "concurrency": 16}},
        "shards": 1,
    }
    config, place, state = tmp_path / "config.json", tmp_path / "target", tmp_path / "state"
    prompts, output = tmp_path / "prompts", tmp_path / "completions" / "000.parquet"
    durable.write_json(config, settings)
    common = ["--config", str(config)]
    assert prepare_target.main([*common, "--output", str(place)]) == 0
    dataset = [*common, "--dataset", "chat", "--target", str(place)]
    assert prepare_prompts.main([*dataset, "--output", str(prompts)]) == 0
    with lease(load_config(config), place, state, "short") as held:
        [endpoint] = held.endpoints()
        shard = ["--shard", "000", "--prompts", str(prompts / "000.parquet"), "--output", str(output)]
        assert generate_completions.main([*dataset, *shard, "--state", str(state)]) == 0, capfd.readouterr().err
        check(place, prompts / "000.parquet", output)

        # The request's id, by which replies that were mixed up on the way are told apart.
        request_id = f"{'a' * 32}-0-1"
        body = {"model": settings["model"]["name"], "prompt": [504, 3575], "max_tokens": 1, "request_id": request_id}
        reply = requests.post(f"{endpoint.url}/v1/completions", json=body, timeout=60)
        assert reply.json()["id"] == f"cmpl-{request_id}"

        # A client that goes away is all the abort that vLLM knows.
        body = {"model": settings["model"]["name"], "prompt": [504, 3575], "max_tokens": 2000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as thread:
            before = held.metrics()[endpoint.url].generated or 0
            call = thread.submit(requests.post, f"{endpoint.url}/v1/completions", json=body, timeout=5)
            until(lambda: held.metrics()[endpoint.url].running == 1)
            assert isinstance(call.exception(), requests.ReadTimeout)
        until(lambda: held.metrics()[endpoint.url].running == 0)
        assert before < (held.metrics()[endpoint.url].generated or 0) < before + 2000

        folder = str(held.folder.directory)
        server = processes.marked(folder)
        assert any("EngineCore" in process.name() for process in server)
        fleet = held.folder.read(held.folder.fleet)
        os.kill(fleet["keeper"], signal.SIGKILL)
        os.kill(fleet["servers"][0]["pid"], signal.SIGKILL)
    assert stop_servers.main(["--state", str(state)]) == 0
    until(lambda: all(map(processes.ended, server)) and not processes.marked(folder))


def check(place: Path, prompts: Path, output: Path) -> None:
    """Every prompt once, its ids as we render them, its answer in the ids that the engine sampled."""
    target = load_target(place)
    asked, rows = list(read_rows(prompts, Prompt)), list(read_rows(output, Completion))
    assert [row.id for row in rows] == [prompt.id for prompt in asked]
    assert {row.outcome for row in rows} == {"ok", "length"}
    for row in rows:
        history: list[Message] = []
        turns = iter(row.turns)
        for message in row.messages:
            if message.role != "assistant":
                history.append(message)
                continue
            turn = next(turns)
            assert turn.prompt_ids == target.render(history)
            assert turn.ids_origin == "engine"
            assert (turn.output_ids[-1] in target.eos_ids) == (turn.finish_reason == "stop")
            assert len(turn.output_ids) == MAX_TOKENS or turn.finish_reason == "stop"
            assert turn.flags == ([] if turn.finish_reason == "stop" else ["truncated"])
            history.append(message)
    provenance = read_provenance(output)
    assert (provenance["engine"]["kind"], provenance["engine"]["version"]) == ("vllm", "0.32.0")
