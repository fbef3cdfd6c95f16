"""Outputs are split at ids, and put together from text as each family's model writes them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.core.records import Message
from scripts.lib.target.output import Output, reconstruct, reconstruction_flags, thinks_already, with_split_thought
from tests.dialogues import said
from tests.families import FAMILIES, target

THINKING = [name for name, family in FAMILIES.items() if family.written is not None]
WITH_TAGS = [name for name in THINKING if name != "gpt-oss"]
USER = [Message("user", "What is 2+2?")]


@pytest.mark.parametrize("name", THINKING)
def test_thought_and_content(name: str):
    model = target(name)
    output = said(name, model.encode("4."), model.encode("Simple."))
    assert model.split_output(model.render(USER), output) == Output("4.", "Simple.", True, ())


@pytest.mark.parametrize("name", FAMILIES)
def test_content_alone(name: str):
    model = target(name)
    output = said(name, model.encode(" 4. \n"))
    split = model.split_output(model.render(USER), output)
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
    split = model.split_output(model.render(USER), cut)
    assert (split.content, (split.reasoning or "").strip(), split.reasoning_closed) == ("", "Let me consider", False)


@pytest.mark.parametrize("name", WITH_TAGS)
def test_a_tag_typed_letter_by_letter_is_text(name: str):
    model = target(name)
    typed = model.encode("<") + model.encode("/think>")
    assert model.think_close_id not in typed
    output = said(name, model.encode("4."), [*model.encode("It says "), *typed])
    split = model.split_output(model.render(USER), output)
    assert (split.content, split.reasoning) == ("4.", "It says </think>")


@pytest.mark.parametrize("name", WITH_TAGS)
def test_only_the_first_closing_tag_ends_the_thought(name: str):
    model = target(name)
    output = said(name, [*model.encode("4."), model.think_close_id, *model.encode("5.")], model.encode("Simple."))
    split = model.split_output(model.render(USER), output)
    assert (split.content, split.reasoning) == ("4.</think>5.", "Simple.")


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
    assert model.split_output(model.render(USER), model.encode(text)).tool_ids_seen == seen


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
    assert model.split_output(model.render(USER), model.encode(text)) == expected


@pytest.mark.parametrize("name", THINKING)
def test_reconstruction_with_a_thought(name: str):
    model = target(name)
    written = (FAMILIES[name].written or "").replace("{thought}", "Simple.").replace("{content}", "4.")
    prompt = model.render(USER)
    assert reconstruct(model, prompt, "4.", "Simple.", "stop") == model.encode(written)


@pytest.mark.parametrize("name", FAMILIES)
def test_reconstruction_without_a_thought(name: str):
    model = target(name)
    written = FAMILIES[name].written_plain.replace("{content}", "4.")
    assert reconstruct(model, model.render(USER), "4.", None, "stop") == model.encode(written)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(content=st.text(max_size=20), thought=st.none() | st.text(max_size=20))
def test_reconstructed_ids_say_what_the_text_said(name: str, content: str, thought: str | None):
    """What comes back from the ids is the text that went in, where tokens can hold that text at all."""
    model = target(name)
    content, thought = model.decode(model.encode(content)), thought and model.decode(model.encode(thought))
    if model.structural_in(content) or (thought and model.structural_in(thought)):
        return
    ids = reconstruct(model, model.render(USER), content, thought, "stop")
    split = model.split_output(model.render(USER), ids)
    assert ids[-1] in model.eos_ids
    assert split.content.strip("\n") == content.strip("\n")
    if FAMILIES[name].written is not None:
        assert (split.reasoning or "").strip("\n") == (thought or "").strip("\n")


def test_the_reference_case_of_kimi_from_a_hosted_api():
    model = target("kimi-k2.5")
    ids = reconstruct(model, model.render(USER), "4.", "Simple.", "stop")
    assert ids == [*model.encode("Simple."), 163607, *model.encode("4."), 163586]
    cut = reconstruct(model, model.render(USER), "", "Simple.", "length")
    assert cut == model.encode("Simple.")
    cut = reconstruct(model, model.render(USER), "4", "Simple.", "length")
    assert cut == [*model.encode("Simple."), 163607, *model.encode("4")]
    calls = '[{"id":"functions.f:0","type":"function","function":{"name":"f","arguments":"{}"}}]'
    with_tools = reconstruct(model, model.render(USER), "", "Simple.", "tool_calls", calls)
    assert with_tools[-1] == 163586
    assert [token for token in with_tools if token in model.structural_ids] == [
        163607, 163595, 163597, 163598, 163599, 163596, 163586,
    ]  # fmt: skip


def test_reconstruction_for_the_three_kimi_formats_of_prompts():
    """The think tag is the prompt's (K2.5), the model's own (K2-Thinking), or closed already (instant)."""
    opened = {
        name: reconstruct(target(name), target(name).render(USER), "4.", "Simple.", "stop").count(163606)
        for name in ("kimi-k2.5", "kimi-k2-thinking", "kimi-k2.5-instant")
    }
    assert opened == {"kimi-k2.5": 0, "kimi-k2-thinking": 1, "kimi-k2.5-instant": 0}


@pytest.mark.parametrize(
    ("content", "thought", "count", "flags"),
    [
        ("4.", "Simple.", 3, []),
        ("4.", "Simple.", None, []),
        ("4.", None, 4, ["length_mismatch"]),
        ("4\ufffd", None, 3, ["replacement_character"]),
        ("4", "\ufffd", 3, ["replacement_character"]),
        ("4. ", None, 3, ["outer_blanks"]),
        ("4.", "\nSimple.", 3, ["outer_blanks"]),
    ],
)
def test_signs_of_a_wrong_reconstruction(content: str, thought: str | None, count: int | None, flags: list[str]):
    assert reconstruction_flags([1, 2, 3], content, thought, count) == flags


@pytest.mark.parametrize("name", WITH_TAGS)
def test_thoughts_in_content_are_split_once(name: str):
    model = target(name)
    message = Message("assistant", "<think>\nSimple.\n</think>\n\n4. </think>")
    split = with_split_thought(model, message)
    assert split == Message("assistant", "4. </think>", "Simple.")
    assert with_split_thought(model, split) is split
    user = Message("user", "<think>x</think>")
    assert with_split_thought(model, user) is user
