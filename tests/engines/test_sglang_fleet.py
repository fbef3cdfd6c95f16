"""A real SGLang under the fleet lease: its own flags, its metrics, and all of its processes gone afterwards."""

import os
import signal
from pathlib import Path

import pytest
import requests

from scripts import prepare_target, stop_servers
from scripts.lib.config.file import load_config
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.engines.sglang import installed_help, mamba_flag
from scripts.lib.fleet import processes
from scripts.lib.fleet.lease import lease
from tests.help_options import options, recorded
from tests.stages.test_fleet import until

pytestmark = pytest.mark.engines


def test_mamba_flag_of_the_installed_version(sglang_environment: Path) -> None:
    text = installed_help(str(sglang_environment / "bin" / "python"))
    assert mamba_flag(text, "extra_buffer") == ("mamba-radix-cache-strategy", "extra_buffer")
    with pytest.raises(UserError, match="knows auto, no_buffer, extra_buffer, extra_buffer_lazy, not `half_buffer`"):
        mamba_flag(text, "half_buffer")
    # The flags of our launches are checked against what was recorded of the whole package, with its gRPC servicer.
    assert options(text).items() <= recorded("sglang").items()


def test_server_generates_reports_its_load_and_leaves_no_scheduler_behind(
    sglang_settings: dict, tmp_path: Path
) -> None:
    config, target, state = tmp_path / "config.json", tmp_path / "target", tmp_path / "state"
    durable.write_json(config, sglang_settings)
    assert prepare_target.main(["--config", str(config), "--output", str(target)]) == 0
    with lease(load_config(config), target, state, "short") as held:
        [endpoint] = held.endpoints()
        body = {"input_ids": [504, 3575, 282, 4649], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        answer = requests.post(f"{endpoint.url}/generate", json=body, timeout=300).json()
        assert len(answer["output_ids"]) == 8
        until(lambda: (held.metrics()[endpoint.url].generated or 0) >= 8)
        until(lambda: held.metrics()[endpoint.url].running == 0)  # this series comes a reading later
        folder = str(held.folder.directory)
        server = processes.marked(folder)
        assert "sglang::scheduler" in {process.name() for process in server}
        # Keeper and replica die at once; the schedulers are the server's children.
        fleet = held.folder.read(held.folder.fleet)
        os.kill(fleet["keeper"], signal.SIGKILL)
        os.kill(fleet["servers"][0]["pid"], signal.SIGKILL)
    assert stop_servers.main(["--state", str(state)]) == 0
    until(lambda: all(map(processes.ended, server)) and not processes.marked(folder))
