"""Calls, results and definitions in the shapes of sources and APIs."""

import orjson
import pytest

from scripts.lib.config.model import Fields
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.formats import to_conversation
from scripts.lib.prompts.sources.tool_calls import to_calls, to_tools

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def conversation(*turns, answers=True, **more):
    return to_conversation({"messages": list(turns), **more}, "auto", Fields(), answers)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "arguments": {"a": 2}},
        {"name": "add", "parameters": {"a": 2}},
        '{"name": "add", "arguments": {"a": 2}}',
        "{'name': 'add', 'arguments': {'a': 2}}",
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        '<functioncall> {"name": "add", "arguments": {"a": 2}} <|endoftext|>',
        [CALL],
        ['{"name": "add", "arguments": {"a": 2}}'],
        {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"type": "tool-call", "toolName": "add", "args": {"a": 2}},
        {"type": "tool_use", "name": "add", "input": {"a": 2}},
        {"function": "add", "arguments": {"a": 2}},
    ],
)
def test_forms_of_a_call(call):
    assert orjson.loads(to_calls(call)) == [CALL]


@pytest.mark.parametrize("key", ["id", "call_id", "tool_use_id", "toolCallId"])
def test_ids_are_kept(key):
    assert orjson.loads(to_calls({key: "c1", "name": "add", "arguments": {"a": 2}})) == [{"id": "c1", **CALL}]


@pytest.mark.parametrize("arguments", ['{"a": 2}', "", None, "{}", '{"a": [\n', {}])
def test_arguments_stay_as_they_are(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    assert orjson.loads(to_calls([call])) == [call]


def test_arguments_in_pythons_words_are_read():
    call = {"type": "function", "function": {"name": "add", "arguments": "{'a': True, 'b': None}"}}
    assert orjson.loads(to_calls([call]))[0]["function"]["arguments"] == {"a": True, "b": None}


@pytest.mark.parametrize(
    "call",
    [
        "add(2)", [], {"name": ""}, {"arguments": {}}, 3, {"name": "add", "arguments": [1]},
        {"function": {"name": "add", "arguments": "[1]"}}, {"function": {"name": "add", "arguments": '"x"'}},
        {"function": {"name": "add", "arguments": "7"}},
    ],
)  # fmt: skip
def test_what_is_no_call(call):
    with pytest.raises(Defect) as raised:
        to_calls(call)
    assert raised.value.reason == "bad_tool_call"


HERMES = (
    turn("system", "You call functions. <tools>\n[{'name': 'add'}]\n</tools>"),
    turn("user", "Add."),
    turn("assistant", "<tool_call>\n{'arguments': {'a': 2, 'exact': True}, 'name': 'add'}\n</tool_call>\n"),
    turn("tool", '<tool_response>\n{"name": "add", "content": 2}\n</tool_response>\n'),
    turn("assistant", "It is 2."),
)


def test_calls_that_stand_as_text_are_calls():
    messages = conversation(*HERMES).messages
    assert [m.role for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = orjson.loads(messages[2].tool_calls)
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "exact": True}}
    assert (messages[2].content, messages[3].content, messages[3].name) == ("", '{"name": "add", "content": 2}', "add")


HERMES_PROMPT = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags.\n"
    "<tools>\n[{'name': 'add'}]\n</tools>\nFor each call return a json object within <tool_call></tool_call> tags:\n"
    "<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>\n"
)


@pytest.mark.parametrize(
    ("system", "rest"),
    [
        (HERMES_PROMPT, []),
        (f"Be brief.\n\n{HERMES_PROMPT}\nAnswer in verse.", ["Be brief.\n\n\n\nAnswer in verse."]),
        (
            "Be brief.\n\n# Tools\n\nYou may call functions.\n<tools>\n{}\n</tools>\n\nReturn:\n<tool_call>\n{}\n</tool_call>",
            ["Be brief."],
        ),
        ("Explain what <tools> and <tool_call> are.", ["Explain what <tools> and <tool_call> are."]),
    ],
)
def test_another_models_way_of_calling_is_cut_where_the_tools_are_given(system, rest):
    turns = [turn("system", system), turn("user", "q")]
    found = conversation(*turns, tools=[{"name": "add"}])
    assert [m.content for m in found.messages] == [*rest, "q"]
    assert found.changes == ([] if rest == [system] else ["tool_prompt_cut"])
    assert conversation(*turns).messages[0].content == system  # else nobody tells the target of them


def test_several_calls_and_results_in_one_turn():
    calls = "Both.\n" + "".join(
        f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>\n' for n in (1, 2)
    )
    results = "".join(f"<tool_response>{n}</tool_response>\n" for n in (1, 2))
    for role in ("tool", "user"):
        messages = conversation(
            turn("user", "q"), turn("assistant", calls), turn(role, results), turn("assistant", "3")
        ).messages
        assert [(m.role, m.content) for m in messages[1:]] == [
            ("assistant", "Both."), ("tool", "1"), ("tool", "2"), ("assistant", "3"),
        ]  # fmt: skip
        assert len(orjson.loads(messages[1].tool_calls)) == 2


def test_calls_that_follow_each_other_are_one_turn():
    call = '{"name": "add", "arguments": {"a": 2}}'
    messages = conversation(
        turn("user", "q"), turn("tool_call", call), turn("tool_call", call), turn("tool_response", "2"), turn("tool_response", "2"),
        turn("assistant", "Once more."), turn("function_call", call), turn("observation", "2"), turn("assistant", "2"),
    ).messages  # fmt: skip
    assert [m.role[0] for m in messages] == ["u", "a", "t", "t", "a", "t", "a"]
    assert [orjson.loads(m.tool_calls) for m in messages if m.tool_calls] == [[CALL, CALL], [CALL]]
    assert messages[4].content == "Once more."


def test_calls_and_results_of_a_transcript():
    chat = (
        'USER: Add 2.\n\n\nASSISTANT: <functioncall> {"name": "add", "arguments": \'{"a": 2}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"sum": 2}\n\n\nASSISTANT: It is 2. <|endoftext|>\n\n\n'
    )
    messages = to_conversation({"system": "SYSTEM: You add.", "chat": chat}, "auto", Fields()).messages
    assert [(m.role, m.content) for m in messages] == [
        ("system", "You add."), ("user", "Add 2."), ("assistant", ""), ("tool", '{"sum": 2}'), ("assistant", "It is 2."),
    ]  # fmt: skip
    assert orjson.loads(messages[2].tool_calls)[0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


def test_tags_that_people_talk_about_stay_text():
    text = 'Write <tool_call>{"name": "f"}</tool_call>.'
    messages = conversation(
        turn("user", "How?"), turn("assistant", text), turn("user", "<tool_response> too?")
    ).messages
    assert [(m.content, m.tool_calls) for m in messages] == [
        ("How?", None),
        (text, None),
        ("<tool_response> too?", None),
    ]


@pytest.mark.parametrize("text", ["<tool_call>add(2)</tool_call>", '<tool_call>{"name": "f"}</tool_call> Done.'])
def test_calls_that_can_not_be_read_are_refused_where_they_are_learnt(text):
    turns = [turn("user", "q"), turn("assistant", text), turn("tool", "2"), turn("assistant", "2")]
    with pytest.raises(Defect) as raised:
        conversation(*turns)
    assert raised.value.reason == "bad_tool_call"
    assert conversation(*turns, answers=False).messages[1].tool_calls is not None  # class B says `tool_turns`


@pytest.mark.parametrize(
    "part",
    [
        {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"type": "tool_use", "name": "add", "input": {"a": 2}},
        {"type": "function_call", "name": "add", "arguments": {"a": 2}},
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
    ],
)
def test_parts_that_are_calls(part):
    content = [{"type": "reasoning", "value": "Hm."}, {"type": "text", "value": "I add."}, part]
    message = conversation(turn("user", "q"), turn("assistant", content)).messages[1]
    assert (message.content, message.reasoning, orjson.loads(message.tool_calls)) == ("I add.", "Hm.", [CALL])
    broken = [{"type": "tool_call", "value": "{"}]
    assert conversation(turn("user", "q"), turn("assistant", broken), answers=False).messages[1].tool_calls is not None


def test_results_that_stand_in_a_users_turn():
    results = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
               {"type": "tool_result", "tool_use_id": "c2", "content": {"sum": 3}}, {"type": "text", "text": "Go on."}]  # fmt: skip
    messages = conversation(turn("user", "q"), turn("assistant", "", tool_calls=[CALL]), turn("user", results)).messages
    assert [(m.role, m.content, m.tool_call_id) for m in messages[2:]] == [
        ("tool", "2", "c1"), ("tool", '{"sum": 3}', "c2"), ("user", "Go on.", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("2", "2"),
        (None, ""),
        ([{"type": "text", "text": "2"}], "2"),
        ({"sum": 2}, '{"sum": 2}'),
        ([1, 2], "[1, 2]"),
        (2, "2"),
    ],
)
def test_results_keep_what_they_answer(content, text):
    message = conversation(turn("tool", content, tool_call_id="c1", name="add")).messages[0]
    assert (message.content, message.tool_call_id, message.name) == (text, "c1", "add")


def test_a_users_name_is_not_kept():
    assert conversation(turn("user", "q", name="bob")).messages[0].name is None


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "f"}],
        '[{"name": "f"}]',
        ['{"name": "f"}'],
        {"name": "f"},
        '{"type": "function", "function": {"name": "f"}}',
    ],
)
def test_forms_of_definitions(tools):
    assert orjson.loads(to_tools(tools)) == [{"type": "function", "function": {"name": "f"}}]
    assert conversation(turn("user", "q"), functions=tools).tools == to_tools(tools)
    assert to_tools([]) is to_tools(" ") is to_tools(None) is None


@pytest.mark.parametrize("tools", ["def f()", ["def f()"], [3], 3])
def test_what_are_no_definitions(tools):
    with pytest.raises(Defect) as raised:
        to_tools(tools)
    assert raised.value.reason == "bad_tools"
