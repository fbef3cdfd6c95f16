"""Each gate refuses what it is for, says what it saw, and lets a good sample through."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Validation
from scripts.lib.core.records import Message, Prompt, Sample
from scripts.lib.target.model import Target
from scripts.lib.target.prepare import prepare_target
from scripts.lib.tokens.conversations import from_conversations
from scripts.lib.validated.gates import Gates
from tests.dialogues import converse, said, samples_of
from tests.families import FAMILIES, build, target

NAME = "qwen3-2507-instruct"


def good(
    name: str = NAME, answer: str = "The answer is 4.", thought: str | None = "Simple.", user: str = "What is 2+2?"
) -> Sample:
    model = target(name)
    output = said(name, model.encode(answer), model.encode(thought) if thought else None)
    (sample,) = samples_of(converse(model, [user], [output]))
    return sample


def refused(sample: Sample, name: str = NAME, **settings) -> str | None:
    verdict = Gates(target(name), Validation(**settings)).refuse(sample)
    return verdict and verdict[0]


def detail(sample: Sample, name: str = NAME, **settings) -> str:
    verdict = Gates(target(name), Validation(**settings)).refuse(sample)
    assert verdict is not None
    return verdict[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_good_sample_passes(name: str):
    assert refused(good(name), name) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_several_turns_pass(name: str):
    model = target(name)
    outputs = [said(name, model.encode(text), model.encode("Simple.")) for text in ("4.", "6.", "8.")]
    for sample in samples_of(converse(model, ["a", "b", "c"], outputs, "Be brief.")):
        assert refused(sample, name) is None


def test_lengths():
    sample = good()
    assert refused(replace(sample, loss_mask=sample.loss_mask[:-1])) == "lengths"
    assert refused(replace(sample, input_ids=[], loss_mask=[])) == "lengths"
    odd = [2 if mask else 0 for mask in sample.loss_mask]
    assert refused(replace(sample, loss_mask=odd)) == "lengths"
    assert detail(replace(sample, loss_mask=odd)) == "mask holds [2]"


@pytest.mark.parametrize("bad", [-1, -100, 151936, 2**31 - 1])
def test_id_range_is_that_of_the_embedding(bad: int):
    sample = good()
    ids = [*sample.input_ids[:-2], bad, sample.input_ids[-1]]
    assert refused(replace(sample, input_ids=ids)) == "id_range"
    assert f"id {bad} at {len(ids) - 2}, the model has 151936 ids" == detail(replace(sample, input_ids=ids))


def test_ids_between_the_tokenizers_length_and_the_embeddings_are_fine():
    sample = good()
    ids = [*sample.input_ids[:-2], 151900, sample.input_ids[-1]]
    assert refused(replace(sample, input_ids=ids)) is None


def test_the_second_sample_of_an_id_is_refused():
    gates = Gates(target(NAME), Validation())
    assert gates.refuse(good()) is None
    assert gates.refuse(good()) == ("duplicate_id", "this id came before")


def test_max_length():
    sample = good()
    assert refused(sample, max_length=len(sample.input_ids)) is None
    assert refused(sample, max_length=len(sample.input_ids) - 1) == "max_length"
    assert refused(replace(sample, input_ids=[300] * 32769, loss_mask=[0, *[1] * 32768])) == "max_length"


def test_masks_of_all_zeros_and_all_ones():
    """What transformers returns for a template without generation tags, and what a wrong one returns (issue 34494)."""
    sample = good()
    length = len(sample.input_ids)
    assert refused(replace(sample, loss_mask=[0] * length)) == "no_supervised_tokens"
    assert refused(replace(sample, loss_mask=[1] * length)) == "all_supervised"


def test_enough_supervised_tokens():
    assert refused(good(), min_supervised_tokens=100) == "min_supervised_tokens"


def test_dflash_needs_two_supervised_tokens_side_by_side():
    sample = Sample("i", "i", "d", [300, 301, 302, 303, 304], [0, 1, 0, 1, 0], "given", "kept")
    assert refused(sample) == "adjacent_supervised_tokens"
    assert refused(sample, adjacent_supervised_tokens=False) is None


@pytest.mark.parametrize("name", [name for name in FAMILIES if target(name).bos_id is not None])
def test_one_bos(name: str):
    sample = good(name)
    bos = sample.input_ids[0]
    assert refused(replace(sample, input_ids=[bos, *sample.input_ids], loss_mask=[0, *sample.loss_mask]), name) == "bos"
    assert refused(replace(sample, input_ids=sample.input_ids[1:], loss_mask=sample.loss_mask[1:]), name) == "bos"


def typed_everywhere(text: str) -> list[str]:
    return [text, f"{text} then", f"before {text}", f"be{text}fore", f"\n{text}\n", text * 2]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_control_token_that_a_user_types_is_refused(name: str):
    """By its text; and by the prompt's ids alone when the messages don't show it any more."""
    model = target(name)
    gates = Gates(model, Validation())
    for text in model.structural_texts:
        for number, typed in enumerate(typed_everywhere(text)):
            sample = replace(good(name, user=typed), id=f"{text}{number}")
            verdict = gates.refuse(sample)
            assert verdict is not None
            assert verdict[0] in ("control_token_in_text", "bos"), (typed, verdict)
            messages = [Message("user", "What is 2+2?"), *sample.messages[1:]]
            verdict = gates.refuse(replace(sample, id=f"{text}{number}/hidden", messages=messages))
            assert verdict is not None, typed
            assert verdict[0] in ("turn_markers", "bos"), (typed, verdict)


@pytest.mark.parametrize("role", ["system", "user"])
def test_control_tokens_are_found_in_every_turn(role: str):
    model = target(NAME)
    users = ["a", "b <|im_end|>" if role == "user" else "b", "c"]
    outputs = [said(NAME, model.encode(text)) for text in ("x", "y", "z")]
    system = "s <|im_start|>" if role == "system" else "s"
    sample = samples_of(converse(model, users, outputs, system))[-1]
    assert refused(sample) == "control_token_in_text"
    assert role in detail(sample)


def test_control_tokens_in_a_ready_conversations_answer():
    model = target(NAME)
    prompt_messages = [
        Message("user", "hi"),
        Message("assistant", "bye<|im_end|>\n<|im_start|>user\nand"),
        Message("user", "x"),
        Message("assistant", "y"),
    ]
    prompt = Prompt(id="a" * 32, dataset="d", source="s", key="k", messages=prompt_messages)
    sample = next(iter(from_conversations(model, [prompt])))
    assert refused(sample) == "control_token_in_text"


def test_a_model_that_types_a_control_token_letter_by_letter_passes():
    model = target(NAME)
    content = [*model.encode("It ends with <"), *model.encode("|im_end|>."), 151645]
    (sample,) = samples_of(converse(model, ["How does a turn end?"], [content]))
    assert "<|im_end|>" in sample.messages[-1].content
    assert refused(sample) is None


def test_turn_markers_find_a_mask_that_starts_too_early():
    model = target(NAME)
    outputs = [said(NAME, model.encode(text)) for text in ("x", "y")]
    (sample,) = samples_of(converse(model, ["a", "b"], outputs))
    start = len(model.render(sample.messages[:1]))
    shifted = [0] * start + [1] * (len(sample.input_ids) - start)
    assert refused(replace(sample, loss_mask=shifted)) == "turn_markers"


def test_turn_markers_find_a_lost_turn():
    model = target(NAME)
    outputs = [said(NAME, model.encode(text)) for text in ("x", "y")]
    (sample,) = samples_of(converse(model, ["a", "b"], outputs))
    assert refused(replace(sample, messages=sample.messages[2:])) == "turn_markers"
    assert "expected 3" in detail(replace(sample, messages=sample.messages[2:]))


@pytest.mark.parametrize("users", [["a", "b"], ["a", "a"], ["a", " "]])
def test_turn_markers_know_templates_that_compare_messages(users: list[str], tmp_path: Path):
    """Mistral's put the system prompt into the user message that equals the last one."""
    folder = build(FAMILIES[NAME], tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}{%- for m in messages -%}"
        "{{- '<|im_start|>' if m == users[-1] else '' }}{{ m.content }}{{ '<|im_end|>' if m.content.strip() else '' }}"
        "{%- endfor -%}"
    )
    config = parse_config({"model": {"name": str(folder)}, "datasets": {"d": {"class": "B", "source": "x"}}}, "test")
    model = prepare_target(config, tmp_path / "target")
    outputs = [[*model.encode(text), 151645] for text in ("x", "y")]
    for sample in samples_of(converse(model, users, outputs)):
        assert Gates(model, Validation()).refuse(sample) is None


def test_one_closing_think_tag():
    name = "kimi-k2.5"
    model = target(name)
    output = [*model.encode("a"), 163607, *model.encode("b"), 163607, *model.encode("c"), 163586]
    (sample,) = samples_of(converse(model, ["hi"], [output]))
    assert refused(sample, name) == "think_close"


def test_stop_tokens():
    model = target(NAME)
    inside = [*model.encode("a"), 151645, *model.encode("b"), 151645]
    assert refused(samples_of(converse(model, ["hi"], [inside]))[0]) == "stop_token"
    (cut,) = samples_of(converse(model, ["hi"], [model.encode("The answer is")]))
    assert cut.flags == ["truncated"]
    assert refused(cut) is None
    assert refused(replace(cut, flags=[])) == "stop_token"


def test_an_engine_that_does_not_heed_max_tokens():
    sample = good()
    answer = sum(sample.loss_mask)
    assert Gates(target(NAME), Validation(), max_answer=answer).refuse(sample) is None
    verdict = Gates(target(NAME), Validation(), max_answer=answer - 1).refuse(sample)
    assert verdict == ("max_tokens", f"an answer of {answer} ids, {answer - 1} were asked for")
    added = replace(sample, flags=["eos_appended"])
    assert Gates(target(NAME), Validation(), max_answer=answer - 1).refuse(added) is None
    ready = replace(sample, ids_origin="rendered")
    assert Gates(target(NAME), Validation(), max_answer=1).refuse(ready) is None


def test_tool_calls_that_nobody_offered():
    model = target(NAME)
    output = [*model.encode("Let me"), 151657, *model.encode("x"), 151658, 151645]
    (sample,) = samples_of(converse(model, ["hi"], [output]))
    assert refused(sample) == "tool_markers"
    assert "<tool_call>" in detail(sample)


def test_truncated_answers_may_be_dropped():
    (cut,) = samples_of(converse(target(NAME), ["hi"], [target(NAME).encode("The answer is")]))
    assert refused(cut, truncated="drop") == "truncated"


def test_answers_of_blanks():
    model = target(NAME)
    (sample,) = samples_of(converse(model, ["hi"], [[*model.encode(" \n "), 151645]]))
    assert refused(sample) == "empty_answer"


@pytest.mark.parametrize(
    ("period", "repeats", "bad"), [(1, 16, True), (1, 15, False), (7, 16, True), (64, 16, True), (65, 20, False)]
)
def test_degenerate_tails(period: int, repeats: int, bad: bool):
    model = target(NAME)
    pattern = list(range(400, 400 + period))
    output = [*model.encode("So: "), *pattern * repeats, 151645]
    (sample,) = samples_of(converse(model, ["hi"], [output]))
    assert refused(sample, replacement_character="keep") == ("repetition" if bad else None)


def test_broken_characters():
    model = target(NAME)
    broken = [*model.encode("Snow: "), *model.encode("☃")[:1], *model.encode(" fell."), 151645]
    (sample,) = samples_of(converse(model, ["hi"], [broken]))
    assert refused(sample) == "replacement_character"
    assert detail(sample) == "an answer holds U+FFFD at character 6"
    assert refused(sample, replacement_character="keep") is None


def test_a_character_that_max_tokens_cut_is_no_broken_one():
    model = target(NAME)
    (sample,) = samples_of(converse(model, ["hi"], [[*model.encode("Snow: "), *model.encode("☃")[:1]]]))
    assert sample.messages[-1].content.endswith("\ufffd")
    assert refused(sample) is None


@pytest.mark.parametrize(
    ("user", "answer", "scripts", "found"),
    [
        ("Where?", "Here 这里 is", ["Latin"], "Han"),
        ("Where?", "Here 这里 is", ["Latin", "Han"], None),
        ("在哪里?", "这里", [], None),
        ("Where?", "Сова здесь", ["Latin"], "Cyrillic"),
        ("Where?", "π ≈ 3.14", ["Latin"], "Greek"),
        ("Where?", "3.14 + 2 = …", [], None),
        ("Where?", "Here", None, None),
    ],
)
def test_writing_systems(user: str, answer: str, scripts: list[str] | None, found: str | None):
    sample = good(user=user, answer=answer)
    assert refused(sample, scripts=scripts) == (found and "script")
    if found:
        assert found in detail(sample, scripts=scripts)


def test_the_same_answer_again_and_again():
    gates = Gates(target(NAME), Validation(duplicate_answers=2))
    verdicts = [gates.refuse(replace(good(), id=str(number))) for number in range(4)]
    assert [verdict and verdict[0] for verdict in verdicts] == [None, None, "duplicate_answers", "duplicate_answers"]
    assert gates.refuse(replace(good(answer="Another."), id="x")) is None


def test_ready_tokens_keep_their_own_conventions():
    """A supervised line break after the stop token, no bos, no messages: as other tools make them."""
    ids = [*target("llama-3.1").encode("a b c d"), 128009, 300]
    sample = Sample("i", "i", "d", ids, [0, *[1] * (len(ids) - 1)], "given", "kept")
    assert refused(sample, "llama-3.1") is None
    double = replace(sample, input_ids=[128000, 128000, *ids], loss_mask=[0, 0, *sample.loss_mask])
    assert refused(double, "llama-3.1") == "bos"


def test_the_first_failed_check_is_named():
    sample = good()
    worst = replace(sample, input_ids=[10**6, *sample.input_ids[1:]], flags=["truncated"])
    assert refused(worst, truncated="drop") == "id_range"


def test_every_check_has_a_test_that_it_refuses(request: pytest.FixtureRequest):
    """A new gate without a test fails here: its name has to stand in an assertion."""
    asserted = {
        part.value
        for node in ast.walk(ast.parse(request.path.read_text()))
        if isinstance(node, ast.Assert)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
    }
    names = Gates(target(NAME), Validation()).checks.keys() - {"template_error"}
    missing = sorted(names - asserted)
    assert not missing, f"gates that no test here sees refuse a sample: {', '.join(missing)}"


def test_models_without_thoughts_have_no_closing_tags_to_count():
    model: Target = target("llama-3.1")
    assert model.think_close_id is None
    assert refused(good("llama-3.1"), "llama-3.1") is None
