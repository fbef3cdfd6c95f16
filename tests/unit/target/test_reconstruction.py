"""Text becomes the ids that each family's model would write."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.core.records import Message
from scripts.lib.target.output import split_output
from scripts.lib.target.reconstruction import reconstruct, reconstruction_flags
from tests.families import FAMILIES, target

THINKING = [name for name, family in FAMILIES.items() if family.written is not None]
USER = [Message("user", "What is 2+2?")]


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
    split = split_output(model, model.render(USER), ids)
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


@pytest.mark.parametrize("name", ["kimi-k2.5", "qwen3", "qwen3-2507-thinking", "gemma-4"])
def test_a_thought_that_an_api_leaves_in_the_content(name: str):
    """Servers without a reasoning parser return `Simple.</think>4.`; the closing tag must not come twice."""
    model = target(name)
    prompt = model.render(USER)
    apart = reconstruct(model, prompt, "4.", "Simple.", "stop")
    assert reconstruct(model, prompt, "Simple.</think>4.", None, "stop") == apart
    assert reconstruct(model, prompt, "<think>\nSimple.\n</think>\n\n4.", None, "stop") == apart


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
