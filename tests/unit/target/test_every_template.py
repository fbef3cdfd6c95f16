"""Hundreds of published templates, on one tokenizer that knows every control token: exact samples or a clear refusal."""

from pathlib import Path

import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Validation
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message, Prompt
from scripts.lib.target import turn_format
from scripts.lib.target.control_tokens import KNOWN
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.target.prepare import prepare_target
from scripts.lib.tokens.conversations import from_conversations
from scripts.lib.validated.gates import Gates
from tests.dialogues import assert_exact, converse, samples_of
from tests.families import Family, build, template_files

pytestmark = pytest.mark.slow

TOKENS = {
    text: 2000 + number for number, text in enumerate(dict.fromkeys(text for role in KNOWN.values() for text in role))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(Family("Qwen-Qwen3-0.6B", TOKENS, 4000, "<eos>", bos="<bos>"), tmp_path_factory.mktemp("model"))


def prepared(folder: Path, template: Path, output: Path) -> Target:
    model = {"name": str(folder), "chat_template": str(template), "vocab_size": 4000}
    return prepare_target(
        parse_config({"model": model, "datasets": {"d": {"class": "B", "source": "x"}}}, "test"), output
    )


@pytest.mark.parametrize("template", template_files(), ids=lambda path: path.stem)
def test_a_published_template(template: Path, folder: Path, tmp_path: Path):
    try:
        model = prepared(folder, template, tmp_path / "target")
    except UserError as error:
        assert "chat template" in str(error)
        return
    gates = Gates(model, Validation())
    end = turn_format.of(model).end
    before = "<|channel|>final<|message|>" if model.harmony else ""
    outputs = [model.encode(before + answer + end) for answer in ("4.", "It is 6.", "x")]
    try:
        completion = converse(model, ["What?", "And\n\n", "no. 3"], outputs)
    except TemplateError:
        completion = converse(model, ["What?"], outputs[:1])
    samples = samples_of(completion)
    assert_exact(model, completion.turns, samples)
    for sample in samples:
        assert gates.refuse(sample) is None
    messages = [
        Message("user", "hi"),
        Message("assistant", "\nyo", "hm"),
        Message("user", "more"),
        Message("assistant", "ok 12"),
    ]
    for sample in from_conversations(model, [Prompt(id="0" * 32, dataset="d", source="s", key="k", messages=messages)]):
        verdict = gates.refuse(sample)
        assert verdict is None or verdict[0] == "template_error"
