"""A kind of engine that the project has never heard of goes through a whole job, by one class and one line."""

import gc
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.client.canary import _QUESTION
from scripts.lib.completions.generate import generate
from scripts.lib.completions.job import ShardJob
from scripts.lib.config.file import load_config
from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message, read_provenance
from scripts.lib.engines import ENGINES
from scripts.lib.engines.launching import PROBE_IDS
from scripts.lib.fleet.lease import lease
from tests.generation import DATASET, SHARD, Run, prompts, target_folder
from tests.stages.abacus import Abacus
from tests.stages.abacus_server import said


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threshold = gc.get_threshold()
    monkeypatch.setitem(ENGINES, Abacus.kind, Abacus)
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def job(folder: Path, **flags: str) -> tuple[Run, ShardJob, Path]:
    run = Run(folder, prompts(40), [], answers=said)
    diary = folder / "diary.jsonl"
    config = load_config(run.config_path)
    launch = config.engine.launch.model_copy(update={"flags": {"diary": str(diary), **flags}, "linger": 0.2})
    engine = config.engine.model_copy(update={"kind": Abacus.kind, "launch": launch})
    config = config.model_copy(update={"engine": engine})
    return run, ShardJob(config, DATASET, SHARD, target_folder(), run.prompts, run.output, run.state), diary


def generated_tokens(config: Config, run: Run) -> int:
    """What the servers' keeper has read from their load, once it has."""
    with lease(config, target_folder(), run.state, "short") as held:
        [endpoint] = held.endpoints()
        generate(ShardJob(config, DATASET, SHARD, target_folder(), run.prompts, run.output, run.state))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            load = held.metrics().get(endpoint.url)
            if load is not None and load.generated and load.generated > 40:
                return load.generated
        raise AssertionError("its load was never read")


def test_a_new_engine_needs_its_class_and_one_line(tmp_path: Path) -> None:
    run, shard, diary = job(tmp_path)
    tokens = generated_tokens(shard.config, run)
    assert set(run.check()) <= {"ok", "length"}
    noted = [json.loads(line) for line in diary.read_text().splitlines()]
    questions = [entry["question"] for entry in noted if "question" in entry]
    canary = run.target.render([Message("user", _QUESTION)])
    assert questions[0] == PROBE_IDS  # ready means that it has generated
    assert canary in questions
    assert Counter(entry["path"] for entry in noted)["/who"] == 1
    asked = Counter(map(tuple, questions))
    assert all(asked[tuple(row.prompt_ids)] == 1 for row in run.rows)
    assert tokens <= sum(len(said(ids, 400)[0]) for ids in questions)
    engine = read_provenance(run.output)["engine"]
    assert (engine["kind"], engine["version"]) == ("abacus", "7")


def test_a_new_engine_that_serves_another_model_is_refused(tmp_path: Path) -> None:
    _, shard, diary = job(tmp_path, called="somebody-else")
    with pytest.raises(UserError, match="does not serve `target` but somebody-else"):
        generate(shard)
    assert not any(
        len(json.loads(line).get("question", ())) > len(PROBE_IDS) for line in diary.read_text().splitlines()
    )
