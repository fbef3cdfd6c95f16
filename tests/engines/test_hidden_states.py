"""Hidden states from a real SGLang, from ready conversations to files, beside what transformers computes."""

import copy
import json
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open

from scripts.lib.core import durable
from tests.workflow.project import Project

pytestmark = pytest.mark.engines

SAMPLES, LAYERS = 5, [2, 15, 27]  # of 30


@pytest.fixture
def project(sglang_settings: dict, tmp_path: Path) -> Project:
    """Class A only: no server is needed before the hidden states."""
    settings = copy.deepcopy(sglang_settings)
    settings["datasets"] = {
        "conversations": {"class": "A", "source": "config/prompts/conversations.jsonl", "max_samples": 8}
    }
    settings |= {"shards": 1, "hidden_states": {"max_samples": SAMPLES}}
    return Project(tmp_path / "project", settings)


def test_states_are_those_of_the_named_layers(project: Project, sglang_environment: Path, model_folder: Path) -> None:
    planned = project.snakemake("-n", "hidden_states").stdout
    assert "4,624 bytes a token; there is no corpus yet" in planned
    project.patience = 900
    project.snakemake("merge_training")
    planned = project.snakemake("-n", "hidden_states").stdout
    assert "states 2, 15, 27 and the last of 30 layers, 576 wide, bfloat16: 4,624 bytes a token x about" in planned

    said = project.snakemake("hidden_states").stdout
    assert f"done: {SAMPLES} samples" in said
    folder = project.result("hidden_states")
    manifest = durable.read_json(folder / "manifest.json")
    totals = manifest["totals"]
    assert (totals["samples"], totals["failed"]) == (SAMPLES, 0)
    assert manifest["layers"]["hidden_states"] == LAYERS
    assert manifest["engine"]["versions"] == ["sglang 0.5.23"]
    for one in manifest["files"]:
        path = folder / one["file"]
        assert durable.sha256_file(path) == one["sha256"]
        with safe_open(path, "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        assert shapes == {
            "input_ids": [one["tokens"]],
            "loss_mask": [one["tokens"]],
            "aux_hidden_state": [one["tokens"], 3 * 576],
            "hidden_state": [one["tokens"], 576],
        }
        # What the plan said, and a header.
        assert 0 < one["bytes"] - 4624 * one["tokens"] < 1000

    files = [str(folder / one["file"]) for one in manifest["files"]]
    script = Path(__file__).with_name("reference_states.py")
    command = [sglang_environment / "bin" / "python", script, model_folder, *files]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    compared = json.loads(done.stdout)
    assert len(compared) == 4 * SAMPLES
    for number, one in enumerate(compared):
        distances = one["distances"]
        right = [*LAYERS, 30][number % 4]
        nearest, second = sorted(range(31), key=distances.__getitem__)[:2]
        assert nearest == right, one
        # Two ways of rounding bfloat16 part by a few percent; a neighbouring layer or token is another vector.
        assert distances[nearest] < 0.05, one
        assert distances[second] > 3 * distances[nearest], one
        assert one["moved"] > 0.3, one

    again = project.snakemake("hidden_states").stdout
    assert "Nothing to be done" in again
    # Snakemake's own deletion of the receipt costs no request, and needs no server.
    project.result("state/hidden_states.json").unlink()
    said = project.snakemake("hidden_states").stdout
    assert f"{SAMPLES} of {SAMPLES} samples are there and whole" in said
    assert "capturing" not in said
    assert durable.read_json(folder / "manifest.json")["files"] == manifest["files"]
