"""Every export through the own loader of the trainer that it is for, sample by sample."""

import random
from dataclasses import asdict

import numpy as np
import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.core import durable
from scripts.lib.exports import export
from scripts.lib.hidden_states.plan import make_plan
from scripts.lib.hidden_states.store import CorpusRow, StateFiles
from tests.conversations import answered, text, with_tools
from tests.corpora import config, corpus, rows_of, shard

pytestmark = pytest.mark.trainers


@pytest.fixture(scope="module")
def training(tmp_path_factory, target):
    """Sixty conversations of one to three turns."""
    folder = tmp_path_factory.mktemp("corpus")
    samples = [answered(target, number, turns=1 + number % 3) for number in range(60)]
    corpus(folder, config(("alpha",)), [shard(folder / "alpha/000.parquet", samples, target.provenance())])
    return folder / "training"


@pytest.fixture
def exported(training, target, tmp_path):
    def made(name):
        export(name, training, target, tmp_path / name, say=lambda line: None)
        return tmp_path / name

    return made


@pytest.mark.parametrize("loader", ["specforge_tokens", "speculators", "datasets_json"])
def test_tokens_and_masks_survive(exported, load, training, target_folder, loader):
    rows = load(loader, exported("tokens"), target_folder)
    expected = [(row.input_ids, row.loss_mask) for row in rows_of(training)]
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == expected


def answers(training):
    """What a trainer should see of each answer: ids up to its stop token, and its mask, the last answer's only."""
    for row in rows_of(training):
        ends = [at + 1 for at, one in enumerate(row.loss_mask) if one and row.loss_mask[at + 1 : at + 2] != [1]]
        for end in ends:
            start = end
            while row.loss_mask[start - 1]:
                start -= 1
            yield tuple(row.input_ids[:end]), (0,) * start + (1,) * (end - start)


@pytest.mark.parametrize(("name", "loader"), [("specforge", "specforge_conversations"), ("messages", "automodel")])
def test_conversations_give_the_same_ids_and_masks(exported, load, training, target_folder, name, loader):
    rows = load(loader, exported(name), target_folder)
    # The template ends with a line break after the stop token, which no engine samples.
    seen = {(tuple(row["input_ids"][:-1]), tuple(row["loss_mask"][:-1])) for row in rows}
    assert seen == set(answers(training))
    assert len(rows) == len(seen)


def test_messages_give_the_same_ids(exported, load, training, target_folder):
    rows = load("model_optimizer", exported("messages"), target_folder)
    assert {tuple(row["input_ids"][:-1]) for row in rows} == {ids for ids, _ in answers(training)}


def test_datasets_folder_holds_every_column(exported, load, training, target_folder):
    rows = load("datasets_folder", exported("datasets"), target_folder)
    assert rows == [asdict(row) for row in rows_of(training)]


def plain(messages):
    return [{"role": message.role, "content": message.content} for message in messages]


def test_angelslim_features_fit(exported, load, training, target_folder):
    rows = load("angelslim", exported("angelslim"), target_folder)
    assert rows == [{"id": row.id, "conversations": plain(row.messages)} for row in rows_of(training)]


@pytest.mark.parametrize("name", ["deepspec", "torchspec"])
def test_conversations_load(exported, load, training, target_folder, name):
    rows = load("datasets_json", exported(name), target_folder)
    assert [row["conversations"] for row in rows] == [plain(row.messages) for row in rows_of(training)]


def test_eagle_rows_load(exported, load, training, target_folder):
    rows = load("datasets_json", exported("eagle"), target_folder)
    assert [[turn["value"] for turn in row["conversations"]] for row in rows] == [
        [message.content for message in row.messages] for row in rows_of(training)
    ]


@pytest.mark.parametrize(("name", "loader"), [("specforge", "specforge_conversations"), ("messages", "automodel")])
def test_rare_keys_do_not_stop_the_load(load, target, target_folder, tmp_path, name, loader):
    """One thought, one tool call, one tool definition, far behind the first block that `datasets` looks at."""
    filler = text(random.Random(0), 1500)
    samples = [answered(target, number) for number in range(1800)]
    for sample in samples:
        sample.messages[0].content = filler
    samples.append(with_tools(target, 5000))
    corpus(tmp_path, config(("alpha",)), [shard(tmp_path / "alpha/000.parquet", samples, target.provenance())])
    export(name, tmp_path / "training", target, tmp_path / name, say=lambda line: None)
    (file,) = (tmp_path / name / "data").iterdir()
    assert file.stat().st_size > 11 << 20
    assert len(load(loader, tmp_path / name, target_folder)) == len(samples)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_hidden_states_become_specforge_features(load, training, target_folder, tmp_path, method):
    durable.write_json(tmp_path / "model/config.json", {"hidden_size": 6, "num_hidden_layers": 12})
    settings = {
        "model": {"name": str(tmp_path / "model")},
        "engine": {"kind": "sglang"},
        "datasets": {"alpha": {"class": "B", "source": "x"}},
        "hidden_states": {"method": method, "layers": [2, 6, 9]},
    }
    plan = make_plan(parse_config(settings, "test"))
    store, expected = StateFiles(tmp_path / "states", plan), []
    for number, row in enumerate(sorted(rows_of(training), key=lambda row: row.id)[:4]):
        ids, mask = np.array(row.input_ids, np.int32), np.array(row.loss_mask, np.int8)
        dice = np.random.default_rng(number)
        states = {c.tensor: dice.integers(0, 0x7F00, (len(ids), c.width), np.uint16) for c in plan.captures}
        store.write(CorpusRow(row.id, ids, mask), states, "sglang 1")
        wide = {name: (one.astype(np.uint32) << 16).view(np.float32).tolist() for name, one in states.items()}
        one = {"input_ids": row.input_ids, "loss_mask": row.loss_mask}
        if method == "eagle3":
            # SpecForge learns nothing from the last position: no token follows it.
            one["loss_mask"] = [*row.loss_mask[:-1], 0]
            one |= {"hidden_state": wide["aux_hidden_state"], "target": wide["hidden_state"]}
            one["attention_mask"] = [1] * len(ids)
        else:
            one |= {"hidden_states": wide["hidden_states"]}
        expected.append(one)
    durable.write_json(tmp_path / "states/manifest.json", {"method": method})
    assert load("specforge_features", tmp_path / "states", target_folder) == expected
