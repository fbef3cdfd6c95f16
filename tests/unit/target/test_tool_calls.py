"""Calls and results as each template wants them, whatever the source left out."""

from pathlib import Path

import pytest

from scripts.lib.core.exact_json import json_text, parse_json
from scripts.lib.core.records import Message, Prompt
from scripts.lib.target import tool_calls
from scripts.lib.target.tool_calls import CallForm
from scripts.lib.tokens.conversations import from_conversations
from tests.families import FAMILIES, published, target

ID = "0123456789abcdef" * 2


def call(name: str, call_id: str | None = None, **more) -> dict:
    arguments = more.pop("arguments", '{"sack": 1}')
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


def turn(*calls: dict) -> Message:
    return Message("assistant", "", tool_calls=json_text(list(calls)))


def ids(messages: list[Message]) -> list[str]:
    return [made["id"] for message in messages if message.tool_calls for made in parse_json(message.tool_calls)]


def answered(messages: list[Message]) -> list[str | None]:
    return [message.tool_call_id for message in messages if message.role == "tool"]


def prompt(*messages: Message) -> Prompt:
    return Prompt(id=ID, dataset="d", source="s:1", key="k", messages=[Message("user", "How many?"), *messages])


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([None, None], ["functions.count:0", "functions.weigh:1"]),
        (["call_1", "call_2"], ["functions.count:0", "functions.weigh:1"]),
        (["functions.count:4", "weigh:5"], ["functions.count:4", "weigh:5"]),
        (["functions.weigh:0", ""], ["functions.count:0", "functions.weigh:1"]),
        (["functions.count", "xfunctions.weigh:1"], ["functions.count:0", "functions.weigh:1"]),
    ],
)
def test_where_only_the_id_holds_the_name_it_does(given: list[str | None], made: list[str]):
    form = tool_calls.form_of(target("kimi-k2.5"))
    assert form == CallForm(ids="named")
    asked = [turn(call("count", given[0])), Message("tool", "3"), turn(call("weigh", given[1])), Message("tool", "5")]
    formed = form.applied(asked)
    assert ids(formed) == made
    assert answered(formed) == made
    assert formed == form.applied(formed)


def test_results_belong_to_their_calls_whatever_their_order():
    calls = turn(call("count", "a"), call("count", "b"), call("weigh", "c"))
    form = CallForm(ids="named")
    by_id = [Message("tool", "3", tool_call_id="b"), Message("tool", "5", tool_call_id="c"), Message("tool", "7")]
    assert answered(form.applied([calls, *by_id])) == ["functions.count:1", "functions.weigh:2", "functions.count:0"]
    by_name = [Message("tool", "5", name="weigh"), Message("tool", "3", name="count"), Message("tool", "4")]
    assert answered(form.applied([calls, *by_name])) == ["functions.weigh:2", "functions.count:0", "functions.count:1"]
    in_order = [Message("tool", text) for text in "345"]
    assert answered(form.applied([calls, *in_order])) == ["functions.count:0", "functions.count:1", "functions.weigh:2"]


def test_ids_that_sources_use_again_in_every_turn():
    asked = [turn(call("count", "c1")), Message("tool", "3", tool_call_id="c1")] * 2
    assert answered(CallForm(ids="named").applied(asked)) == ["functions.count:0", "functions.count:1"]
    assert answered(CallForm().applied(asked)) == ["c1", "c1"]


def test_a_result_that_answers_nothing_keeps_what_it_has():
    stray = Message("tool", "3", tool_call_id="x")
    assert CallForm().applied([stray]) == [stray]
    one = [turn(call("count", "a")), Message("tool", "3"), stray]
    assert answered(CallForm().applied(one)) == ["a", "x"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("nothing", ["", " ", "null", None, {}, "missing"])
def test_a_call_without_arguments_has_empty_ones(name: str, nothing: object):
    """vLLM hands {} to the template (vllm issue 19419), whichever way a source says it."""
    bare = call("clock", arguments=nothing)
    if nothing == "missing":
        del bare["function"]["arguments"]
    given, plain = (
        list(
            from_conversations(
                target(name), [prompt(turn(made), Message("tool", "12:04"), Message("assistant", "Noon."))]
            )
        )
        for made in (bare, call("clock", arguments="{}"))
    )
    assert [sample.input_ids for sample in given] == [sample.input_ids for sample in plain]
    assert [sample.flags for sample in given] == [sample.flags for sample in plain]


def test_a_supervised_call_of_kimi_holds_its_function():
    model = target("kimi-k2.5")
    messages = [turn(call("count_sacks")), Message("tool", "3"), Message("assistant", "Three.")]
    (sample,) = from_conversations(model, [prompt(*messages)])
    supervised = model.decode([token for token, mask in zip(sample.input_ids, sample.loss_mask) if mask])
    assert "<|tool_call_begin|>functions.count_sacks:0<|tool_call_argument_begin|>" in supervised
    assert "## Return of functions.count_sacks:0\n3" in model.decode(sample.input_ids)
    assert answered(sample.messages) == ["functions.count_sacks:0"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("moonshotai-Kimi-K2-Instruct-0905", CallForm(ids="named")),
        ("moonshotai-Kimi-K2", CallForm()),  # prints the name as well
        ("mistralai-Mistral-Nemo-Instruct-2407", CallForm(ids="nine")),
        ("unsloth-functiongemma-270m-it", CallForm(results_named=True)),
        ("upstage-Solar-Open-100B", CallForm()),
        ("google-gemma-2-2b-it", CallForm()),  # knows no tools
    ],
)
def test_forms_of_published_templates(template: str, form: CallForm, tmp_path: Path):
    assert tool_calls.form_of(published(template, tmp_path, "llama-3.1")) == form


def test_mistral_takes_nine_letters_and_digits(tmp_path: Path):
    model = published("mistralai-Mistral-Nemo-Instruct-2407", tmp_path, "llama-3.1")
    messages = [
        turn(call("count", "call_Ab12cd34E"), call("count", "c1"), call("count")),
        *(Message("tool", text) for text in "345"),
        Message("assistant", "Twelve."),
    ]
    formed = tool_calls.form_of(model).applied(messages)
    assert ids(formed) == answered(formed) == ["Ab12cd34E", "000000001", "000000002"]
    text = model.render_text([Message("user", "How many?"), *formed[:-1]])
    assert '"id": "Ab12cd34E"' in text


def test_a_result_gets_its_functions_name_where_it_must_have_one(tmp_path: Path):
    model = published("unsloth-functiongemma-270m-it", tmp_path, "llama-3.1")
    formed = tool_calls.form_of(model).applied([turn(call("count")), Message("tool", "3")])
    assert formed[1].name == "count"
    assert "response:count" in model.render_text([Message("user", "How many?"), *formed])
