"""Outputs are split at ids, and put together from text as each family's model writes them."""

from pathlib import Path

import pytest

from scripts.lib.core.records import Message
from scripts.lib.target.model import Target
from scripts.lib.target.output import Output, split_output, thinks_already, thought_length
from tests.dialogues import said
from tests.families import FAMILIES, published, target

THINKING = [name for name, family in FAMILIES.items() if family.written is not None]
WITH_TAGS = [name for name in THINKING if name != "gpt-oss"]
USER = [Message("user", "What is 2+2?")]


@pytest.mark.parametrize("name", THINKING)
def test_thought_and_content(name: str):
    model = target(name)
    output = said(name, model.encode("4."), model.encode("Simple."))
    assert split_output(model, model.render(USER), output) == Output("4.", "Simple.", True, ())


@pytest.mark.parametrize("name", FAMILIES)
def test_content_alone(name: str):
    model = target(name)
    output = said(name, model.encode(" 4. \n"))
    split = split_output(model, model.render(USER), output)
    assert split.content.strip() == "4."
    assert not split.reasoning
    assert split.reasoning_closed


@pytest.mark.parametrize("name", THINKING)
def test_a_truncated_thought_stays_a_thought(name: str):
    """Servers' parsers return it as content (vllm issues 35221 and 50258)."""
    model = target(name)
    output = said(name, [], model.encode("Let me consider"))
    closing = 200007 if name == "gpt-oss" else model.think_close_id
    cut = output[: output.index(closing)]
    split = split_output(model, model.render(USER), cut)
    assert (split.content, (split.reasoning or "").strip(), split.reasoning_closed) == ("", "Let me consider", False)


@pytest.mark.parametrize("name", WITH_TAGS)
def test_a_tag_typed_letter_by_letter_is_text(name: str):
    model = target(name)
    typed = model.encode("<") + model.encode("/think>")
    assert model.think_close_id not in typed
    output = said(name, model.encode("4."), [*model.encode("It says "), *typed])
    split = split_output(model, model.render(USER), output)
    assert (split.content, split.reasoning) == ("4.", "It says </think>")


@pytest.mark.parametrize("name", WITH_TAGS)
def test_only_the_first_closing_tag_ends_the_thought(name: str):
    model = target(name)
    output = said(name, [*model.encode("4."), model.think_close_id, *model.encode("5.")], model.encode("Simple."))
    split = split_output(model, model.render(USER), output)
    assert model.think_tags is not None
    assert (split.content, split.reasoning) == (f"4.{model.think_tags[1]}5.", "Simple.")


def test_a_thought_open_in_an_earlier_turn_does_not_count():
    model = target("kimi-k2.5-instant")
    prompt = model.render(USER)
    assert prompt[-2:] == [163606, 163607]
    assert not thinks_already(model, prompt)
    assert thinks_already(model, prompt[:-1])
    assert not thinks_already(model, [163606, *model.encode("Simple."), 163586])
    assert not thinks_already(model, [163606, *model.encode("Simple.")])


@pytest.mark.parametrize(
    ("name", "text", "seen"),
    [
        ("kimi-k2.5", "</think><|tool_calls_section_begin|><|tool_call_begin|>f:0", (163595, 163597)),
        ("qwen3", "<tool_call>\n{}\n</tool_call><|im_end|>", (151657,)),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", (200012,)),
        ("llama-3.1", "<|python_tag|>f()<|eom_id|>", (128010,)),
        ("minimax-m2", "</think><minimax:tool_call>", (200052,)),
    ],
)
def test_tool_calls_are_seen(name: str, text: str, seen: tuple[int, ...]):
    model = target(name)
    assert split_output(model, model.render(USER), model.encode(text)).tool_ids_seen == seen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>a<|end|>", Output("", "a", False, ())),
        ("<|channel|>analysis<|mess", Output("", None, False, ())),
        ("<|channel|>final<|message|>b", Output("b", None, True, ())),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>plan<|end|>"
            "<|start|>assistant<|channel|>final<|message|>b<|return|>",
            Output("b", "a\nplan", True, ()),
        ),
        ("", Output("", None, True, ())),
    ],
)
def test_harmony_channels(text: str, expected: Output):
    model = target("gpt-oss")
    assert split_output(model, model.render(USER), model.encode(text)) == expected


def text_thinker(tmp_path: Path, template: str = "Skywork-Skywork-R1V3-38B") -> Target:
    """A model whose think tags are ordinary text to its tokenizer."""
    return published(template, tmp_path, lacking=("<think>", "</think>"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm.\n</think>\n\n4.", Output("4.", "Hm.", True, ())),
        ("<think>\nHm.\n</think>\n\n4.", Output("4.", "Hm.", True, ())),
        ("Hm, let me", Output("", "Hm, let me", False, ())),
    ],
)
def test_thoughts_in_text_of_a_model_that_is_prompted_to_think(text: str, expected: Output, tmp_path: Path):
    model = text_thinker(tmp_path)
    prompt = model.render(USER)
    assert split_output(model, prompt, [*model.encode(text), 151645]) == expected
    assert thought_length(model, model.encode(text)) == len(
        model.encode(text.partition("</think>")[0] + "</think>")
    ) * ("</think>" in text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<reasoning>\nHm.\n</reasoning>\n4.", Output("4.", "Hm.", True, ())),
        ("<reasoning>\nHm, let me", Output("", "Hm, let me", False, ())),
        ("4. </reasoning>", Output("4. </reasoning>", None, True, ())),
        ("It ends with <reasoning>", Output("It ends with <reasoning>", None, True, ())),
    ],
)
def test_thoughts_in_text_of_a_model_that_begins_them_itself(text: str, expected: Output, tmp_path: Path):
    model = text_thinker(tmp_path, "RekaAI-reka-flash-3")
    assert split_output(model, model.render(USER), model.encode(text)) == expected


def test_gemmas_channel_and_calls():
    """No list of names holds them: `thought` names the channel and is no part of the thought."""
    model = target("gemma-4")
    prompt = model.render(USER)
    assert split_output(model, prompt, model.encode("<|channel>thought\n<channel|>4.<turn|>")) == Output(
        "4.", "", True, ()
    )
    cut = split_output(model, prompt, model.encode("<|channel>thought\nLet me"))
    assert (cut.content, cut.reasoning, cut.reasoning_closed) == ("", "Let me", False)
    assert not split_output(model, prompt, model.encode("<|channel>thought\n<channel|>")).thinks
    assert split_output(model, prompt, model.encode("<|tool_call>call:f{}<tool_call|>")).tool_ids_seen == (48,)
