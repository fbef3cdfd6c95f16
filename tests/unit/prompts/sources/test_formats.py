"""Rows of every published format, written for these tests, and the conversations that they are."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.config.model import Fields
from scripts.lib.core.records import Message
from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.fields import Columns
from scripts.lib.prompts.sources.formats import _READERS, detect, to_conversation
from scripts.lib.prompts.sources.formats import FORMATS as FORMATS_OF_THE_READER
from scripts.lib.prompts.sources.turns import split_thought


def turns(row, form="auto", **fields):
    """`[(role, content)]` of a row."""
    return [(m.role, m.content) for m in to_conversation(row, form, Fields(**fields)).messages]


def defect(row, form="auto", **fields):
    with pytest.raises(Defect) as raised:
        to_conversation(row, form, Fields(**fields))
    return raised.value.reason


U, A, S, T = "user", "assistant", "system", "tool"

FORMATS = {
    "messages": ({"messages": [{"role": U, "content": "q"}, {"role": A, "content": "a"}]}, [(U, "q"), (A, "a")]),
    "sharegpt": (
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [(S, "s"), (U, "q"), (A, "a")],
    ),
    "dialogue, speaker, text": ({"dialogue": [{"speaker": "prompter", "text": "q"}]}, [(U, "q")]),
    "messages as JSON text": ({"messages": '[{"role": "user", "content": "q"}]'}, [(U, "q")]),
    "messages as Python writes them": ({"messages": "[{'role': 'user', 'content': 'q', 'weight': None}]"}, [(U, "q")]),
    "bare list": ([{"role": U, "content": "q"}], [(U, "q")]),
    "bare text": ("q", [(U, "q")]),
    "upper-case column": ({"Problem": "q", "Rationale": "r", "options": "a) 1 b) 2"}, [(U, "q\n\na) 1 b) 2"), (A, "r")]),
    "turns": ({"question_id": 1, "category": "x", "turns": ["q", "r"]}, [(U, "q"), (U, "r")]),
    "instruction": ({"instruction": "do", "input": "", "output": "done"}, [(U, "do"), (A, "done")]),
    "instruction with input": ({"instruction": "do", "input": "this", "output": "d"}, [(U, "do\n\nthis"), (A, "d")]),
    "only an input": ({"instruction": "", "input": "this", "output": "d"}, [(U, "this"), (A, "d")]),
    "instruction with system and history": (
        {"system": "s", "instruction": "r", "output": "b", "history": [["q", "a"]]},
        [(S, "s"), (U, "q"), (A, "a"), (U, "r"), (A, "b")],
    ),
    "self-instruct": ({"instruction": "do", "instances": [{"input": "x", "output": "y"}]}, [(U, "do\n\nx"), (A, "y")]),
    "question and answer": ({"question": "q", "answer": "a"}, [(U, "q"), (A, "a")]),
    "problem and solution": ({"problem": "q", "solution": "a", "seed": "no", "lang": "c"}, [(U, "q"), (A, "a")]),
    "prompt and response": ({"prompt": "q", "response": "a"}, [(U, "q"), (A, "a")]),
    "prompt alone": ({"task_id": "x/0", "prompt": "def f():", "test": "t"}, [(U, "def f():")]),
    "prompt is messages": ({"prompt": [{"role": U, "content": "q"}], "answer": "a"}, [(U, "q"), (A, "a")]),
    "prompt is messages as text": ({"prompt": '[{"role": "user", "content": "q"}]', "answer": "a"}, [(U, "q"), (A, "a")]),
    "prompt is messages as Python writes them": ({"prompt": "[{'role': 'user', 'content': 'q'}]", "answer": "a"}, [(U, "q"), (A, "a")]),
    "input is messages": ({"input": [{"role": U, "content": "q"}], "output": "a"}, [(U, "q"), (A, "a")]),
    "two messages": ({"message_1": "q", "message_2": "a", "topic": "t"}, [(U, "q"), (A, "a")]),
    "list before scalars": (
        {"instruction": "x", "response": "y", "conversations": [{"from": "human", "value": "q"}]},
        [(U, "q")],
    ),
    "pairs": ({"conversation": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]},
              [(U, "q"), (A, "a"), (U, "r"), (A, "b")]),
    "pairs as lists": ({"history": [["q", "a"], ["r", "b"]]}, [(U, "q"), (A, "a"), (U, "r"), (A, "b")]),
    "DPO, messages": (
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
         "rejected": {"from": "gpt", "value": "z"}},
        [(U, "q"), (A, "a")],
    ),
    "DPO, texts": ({"prompt": "q", "chosen": "a", "rejected": "z"}, [(U, "q"), (A, "a")]),
    "DPO, whole conversations": (
        {"prompt": "q", "chosen": [{"role": U, "content": "q"}, {"role": A, "content": "a"}], "rejected": []},
        [(U, "q"), (A, "a")],
    ),
    "DPO, transcript": (
        {"chosen": "\n\nHuman: q\n\nwith space\n\nAssistant: a\n\nHuman: r\n\nAssistant: b", "rejected": "z"},
        [(U, "q\n\nwith space"), (A, "a"), (U, "r"), (A, "b")],
    ),
    "KTO, liked": ({"prompt": "q", "completion": "a", "label": True}, [(U, "q"), (A, "a")]),
    "instruction with context": ({"instruction": "do", "context": "this", "response": "d"}, [(U, "do\n\nthis"), (A, "d")]),
    "question with a schema": ({"question": "q", "context": "CREATE TABLE t", "answer": "a"}, [(U, "q\n\nCREATE TABLE t"), (A, "a")]),
    "question with a passage": ({"question": "q", "passage": "p"}, [(U, "q\n\np")]),
    "question, article, options": (
        {"question": "q", "article": "t", "options": ["x", "y"]}, [(U, "q\n\nt\n\nA. x\nB. y")],
    ),
    "choices of text and label": (
        {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, [(U, "q\n\n1. x\n2. y")],
    ),
    "a blank context": ({"instruction": "do", "context": " ", "response": "d"}, [(U, "do"), (A, "d")]),
    "prompt is texts": ({"prompt": ["q", "r"], "category": "x"}, [(U, "q"), (U, "r")]),
    "questions and answers": ({"question": ["q", "r"], "answer": ["a", "b"]}, [(U, "q"), (A, "a"), (U, "r"), (A, "b")]),
    "questions alone": ({"question": ["q", "r"]}, [(U, "q"), (U, "r")]),
    "role and text": ({"conversations": [["human", "q"], ["gpt", "a"]]}, [(U, "q"), (A, "a")]),
    "role and parts": ({"messages": [["user", [{"type": "text", "text": "q"}]], ["AI", "a"]]}, [(U, "q"), (A, "a")]),
    "one list deeper": ({"messages": [[{"role": "system", "content": "s"}, {"role": U, "content": "q"}]]}, [(S, "s"), (U, "q")]),
    "rounds": (
        {"messages": [[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                      [{"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}]]},
        [(U, "q"), (A, "a"), (U, "r"), (A, "b")],
    ),
    "user and bot": ({"conversation": [{"user": "q", "bot": "a"}]}, [(U, "q"), (A, "a")]),
    "q and a": ({"conversation": [{"q": "q", "a": "a"}, {"Q": "r", "A": "b"}]}, [(U, "q"), (A, "a"), (U, "r"), (A, "b")]),
    "role as key": ({"messages": [{"system": "s"}, {"user": "q"}, {"assistant": "a"}]}, [(S, "s"), (U, "q"), (A, "a")]),
    "a row that is a pair": ({"human": "q", "bot": "a", "source": "x"}, [(U, "q"), (A, "a")]),
    "pair with an instruction's input": (
        {"conversation": [{"instruction": "do", "input": "this", "output": "d"}]}, [(U, "do\n\nthis"), (A, "d")],
    ),
    "a transcript": ({"text": "### Human: q### Assistant: a"}, [(U, "q"), (A, "a")]),
    "a transcript as conversation": ({"conversation": "USER: q ASSISTANT: a</s>"}, [(U, "q"), (A, "a")]),
    "a prompt that is the start of one": ({"prompt": "\n\nHuman: q\n\nAssistant:", "response": "a"}, [(U, "q"), (A, "a")]),
    "question with several contexts": ({"question": "q", "contexts": ["c", "d"]}, [(U, "q\n\nc\n\nd")]),
    "system with its marker": ({"system": "SYSTEM: s", "chat": "USER: q\n\n\nASSISTANT: a"}, [(S, "s"), (U, "q"), (A, "a")]),
    "completion is messages": (
        {"prompt": [{"role": U, "content": "q"}], "completion": [{"role": A, "content": "a"}], "label": True},
        [(U, "q"), (A, "a")],
    ),
    "Cohere": ({"messages": [{"role": "User", "content": "q"}, {"role": "Chatbot", "content": "a"}]}, [(U, "q"), (A, "a")]),
    "Gemini": ({"messages": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}]},
               [(U, "q"), (A, "a")]),
    "a question and its query": ({"question": "q", "query": "SELECT 1", "schema": "t"}, [(U, "q")]),
    "LangChain": ({"messages": [{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}]}, [(U, "q"), (A, "a")]),
    "DPO, the prompt a transcript": (
        {"prompt": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant:", "chosen": " b", "rejected": " z"},
        [(U, "q"), (A, "a"), (U, "r"), (A, " b")],
    ),
    "question and answer in one text": ({"text": "Q: q\nA: a"}, [(U, "q"), (A, "a")]),
    "question and answer in a prompt": ({"prompt": "Q: q\nA: a"}, [(U, "Q: q\nA: a")]),
    "turns in columns": ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, [(U, "q"), (A, "a")]),
    "system prompt among the variables": (
        {"messages": [{"role": U, "content": "q"}], "chat_template_kwargs": {"custom_instructions": "s", "python_tools": None}},
        [(S, "s"), (U, "q")],
    ),
    "tree": (
        {"message_tree_id": "t", "prompt": {"role": "prompter", "text": "q", "replies": [
            {"role": "assistant", "text": "worse", "rank": 1, "replies": []},
            {"role": "assistant", "text": "gone", "rank": -1, "deleted": True},
            {"role": "assistant", "text": "better", "rank": 0, "replies": [{"role": "prompter", "text": "r"}]},
        ]}},
        [(U, "q"), (A, "better"), (U, "r")],
    ),
    "text": ({"text": "q", "url": "u"}, [(U, "q")]),
    "nested answer": (
        {"conversation": [{"role": U, "content": "q"}], "generated_message": {"role": A, "content": "a"}}, [(U, "q")]
    ),
    "null columns are absent": ({"messages": None, "prompt": None, "question": "q", "answer": None}, [(U, "q")]),
    "a number called turn": ({"turns": 2, "turn": 2, "conversation": [{"role": U, "content": "q"}]}, [(U, "q")]),
}  # fmt: skip


def test_every_format_has_a_row_that_auto_knows():
    """`turns` and `sharegpt` are `messages` by another name: readers are compared."""
    rows = [row if isinstance(row, dict) else {} for row, _ in FORMATS.values()]
    known = {detect(Columns(row, Fields())) for row in [*rows, {"input_ids": [1], "labels": [1]}] if row}
    read = {_READERS[name] for name in known}
    missing = [name for name, reader in _READERS.items() if reader not in read]
    assert not missing, f"formats without a row above that `auto` takes for them: {', '.join(missing)}"


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_detected(name):
    row, expected = FORMATS[name]
    assert turns(row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "They listen.", "role": "assistant", "parent_id": "m1"}, "single_message"),
        ({"text": "How?", "role": "prompter", "parent_id": None}, "single_message"),
        ({"body": "no", "text": "I agree.", "parent_id": "t3_x"}, "single_message"),
        ({"role": "user", "content": "q"}, "single_message"),
        ({"from": "human", "value": "q"}, "single_message"),
        ({"prompt": "q", "completion": "bad", "label": False}, "disliked"),
        ({"prompt": "q", "completion": "bad", "label": 0}, "disliked"),
        ({"prompt": "q", "completion": "bad", "label": "False"}, "disliked"),
        ({"prompt": "q", "answer": "bad", "is_good": False}, "disliked"),
        ({"c_id": 0, "role": "user", "message": "q"}, "single_message"),
        ({"messages": [{"role": U, "content": "q"}, {"role": A, "content": "bad"}], "label": False}, "disliked"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "bad"}], "kto_tag": False}, "disliked"),
        ({"messages": [{"role": U, "content": "q"}, {"role": A, "content": "bad"}], "weight": 0}, "not_to_learn"),
        ({"question": "q", "answer": "bad", "trainable": False}, "not_to_learn"),
        ({"dialog": ["Hi.", "Hello, how are you?", "Fine."]}, "bad_messages"),
        ({"messages": [["user", "q"], ["What?", "a"]]}, "bad_messages"),
        ({"messages": [[{"role": U, "content": "q"}], [{"role": U, "content": "r"}]]}, "bad_messages"),
        ({"text": "Human: q"}, "transcript"),
    ],
)  # fmt: skip
def test_rows_that_are_no_prompt_are_refused(row, reason):
    assert defect(row) == reason


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "role": "teacher"},
        {"prompt": "q", "response": "a", "label": 0},
        {"prompt": "q", "response": "a", "weight": 0.35, "train": "train"},
        {"prompt": "System: Windows 11. Why is it slow?"},
        {"prompt": "### Question:\nWhat?\n### Answer: (use the format)"},
    ],
)
def test_what_only_looks_like_it_is_kept(row):
    assert turns(row)[0] == (U, row["prompt"])


def test_a_prompt_that_is_named_is_taken_as_it_is():
    row = {"text": "### Human: q### Assistant: a", "context": "c", "options": ["x"], "role": "assistant", "more": "m"}
    assert turns(row, prompt="text") == [(U, row["text"])]
    assert turns(row, prompt="text", input="more") == [(U, row["text"] + "\n\nm")]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": 42},
        {"question": "q", "answer": {"spans": [1, 2]}},
        {"prompt": "q", "response": True},
        {"messages": [{"role": U, "content": "q"}, {"role": A, "content": 42}]},
        {"messages": [{"role": U, "content": "q"}, {"role": A, "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": U, "content": "q"}, {"role": A, "content": "a", "weight": "much"}]},
        {"messages": [{"role": U, "content": "q"}, {"role": A, "content": "a"}], "label": False},
        {"prompt": "q", "completion": "bad", "label": False},
        {"history": [["q", 42]]},
        {"prompt": "q", "chosen": 42, "rejected": 41},
        {"instruction": "q", "instances": [{"input": "", "output": 42}]},
        {"messages": [{"role": U, "content": "q"}, {"role": A, "content": None, "reasoning_content": ["hm"]}]},
    ],
)
def test_class_b_never_needs_the_answers(row):
    messages = to_conversation(row, "auto", Fields(), answers=False).messages
    assert [(m.role, m.content) for m in messages if m.role == U] == [(U, "q")]
    assert messages[1].role == A  # so that cutting it is counted


@pytest.mark.parametrize("value", [{"enable_thinking": False, "xml_tools": None}, '{"enable_thinking": false}'])
def test_template_variables_of_a_row(value):
    row = {"messages": [{"role": U, "content": "q"}], "chat_template_kwargs": value}
    conversation = to_conversation(row, "auto", Fields())
    assert (conversation.template_kwargs, conversation.unused) == ('{"enable_thinking":false}', {})


def test_tools_among_the_variables_are_tools():
    tool = {"name": "f", "parameters": {}}
    variables = {"custom_instructions": "s", "xml_tools": [orjson.dumps(tool).decode()], "tools": 1, "messages": 2}
    conversation = to_conversation({"prompt": "q", "chat_template_kwargs": variables}, "auto", Fields())
    assert orjson.loads(conversation.tools) == [{"type": "function", "function": tool}]
    assert conversation.template_kwargs is None


def test_columns_that_nobody_reads_are_told():
    row = {
        "ID": "1", "uuid": "2", "question": "q", "Answer": "a", "support": "because", "notes": [{"by": "me"}, "x"],
        "score": 3, "ok": True, "none": None, "blank": " ", "same": "q",
    }  # fmt: skip
    assert to_conversation(row, "auto", Fields()).unused == {"support": 7, "notes": 3}
    assert to_conversation(row, "auto", Fields(prompt="question", input="support")).unused == {"notes": 3, "same": 1}
    assert to_conversation(row | {"meta": {"a": "x", "b": "y"}}, "auto", Fields(system="meta.a")).unused == {
        "support": 7,
        "notes": 3,
    }


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": [{"role": U, "content": "q"}], "text": "no"}),
        ("text", {"messages": [{"role": U, "content": "no"}], "text": "q"}),
        ("question_answer", {"instruction": "no", "question": "q"}),
        ("prompt_response", {"instruction": "no", "prompt": "q"}),
        ("instruction", {"question": "no", "instruction": "q"}),
        ("preference", {"prompt": "q", "rejected": "no"}),
    ],
)
def test_format_that_is_named_wins(form, row):
    assert turns(row, form)[0] == (U, "q")


def test_fields_override_columns():
    row = {
        "id": 3,
        "prompt": "no",
        "meta": {"question": "q", "list": [{"a": "x"}]},
        "good": "a",
        "why": "r",
        "boss": "s",
    }
    conversation = to_conversation(
        row, "auto", Fields(prompt="meta.question", response="good", reasoning="why", system="boss", id="meta.list.0.a")
    )
    assert conversation.messages == [Message(S, "s"), Message(U, "q"), Message(A, "a", reasoning="r")]
    assert conversation.row_id == "x"


def test_fields_override_turns():
    row = {"log": [{"who": "human", "said": "q", "role": "no"}], "final": {"content": "a"}}
    assert turns(row, messages="log", role="who", content="said", response="final") == [(U, "q"), (A, "a")]


def test_given_input_column_is_part_of_the_prompt():
    assert turns({"ask": "q", "about": "x"}, prompt="ask", input="about") == [(U, "q\n\nx")]


ROLE_NAMES = {
    U: ["user", "human", "prompter", "User", " HUMAN "],
    A: ["assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"],
    S: ["system", "developer"],
    T: ["tool", "function", "observation", "ipython"],
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in ROLE_NAMES.items() for name in names])
def test_roles(role, name):
    assert turns({"messages": [{"role": name, "content": "x"}]}) == [(role, "x")]


@pytest.mark.parametrize("role", ["narrator", "", "gpt-4", 7, None, ["user"]])
def test_unknown_role_is_named(role):
    assert defect({"messages": [{"role": role, "content": "x"}]}) == "unknown_role"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"], "abc"),
        ({"type": "text", "text": "x"}, "x"),
        ([], ""),
    ],
)
def test_content(content, text):
    assert turns({"messages": [{"role": U, "content": content}]}) == [(U, text)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "media"),
        ([{"type": "image"}, {"type": "text", "text": "x"}], "media"),
        ([{"type": "input_audio", "data": "x"}], "media"),
        ([{"type": "tool_use", "name": "x"}], "unknown_content"),
        ([{"type": "text", "text": 3}], "unknown_content"),
        (3, "unknown_content"),
        ([[1]], "unknown_content"),
    ],
)
def test_content_that_is_no_text(content, reason):
    assert defect({"messages": [{"role": U, "content": content}]}) == reason


def test_images_beside_the_text():
    assert defect({"prompt": "q", "images": ["a.png"]}) == "media"
    assert turns({"prompt": "q", "images": []}) == [(U, "q")]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "a", "reasoning_content": "r"},
        {"content": "a", "reasoning": "r"},
        {"content": "a", "thinking": "r"},
        {"content": [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "a"}]},
        {"content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}]},
        {"content": "<think>\nr\n</think>\n\na"},
        {
            "content": "<|begin_of_thought|>\n\nr\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\na\n\n<|end_of_solution|>"
        },
    ],
)
def test_reasoning_wherever_it_stands(answer):
    conversation = to_conversation({"messages": [{"role": U, "content": "q"}, {"role": A, **answer}]}, "auto", Fields())
    message = conversation.messages[1]
    split_thought(message)
    assert message == Message(A, "a", reasoning="r")


def test_thought_that_never_closes():
    with pytest.raises(Defect, match="unclosed_reasoning"):
        split_thought(Message(A, "<think>\nand on and on"))


def test_tags_inside_an_answer_are_text():
    message = Message(A, "The tag <think> opens a thought.")
    split_thought(message)
    assert message == Message(A, "The tag <think> opens a thought.")


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "function_call", "value": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
        {"role": A, "content": None, "tool_calls": [CALL]},
        {"role": A, "content": "", "function_call": {"name": "f", "arguments": {"x": 1}}},
    ],
)
def test_tool_calls(turn):
    (message,) = to_conversation({"messages": [turn]}, "auto", Fields()).messages
    assert (message.role, message.content) == (A, "")
    assert orjson.loads(message.tool_calls) == [CALL]


@pytest.mark.parametrize("value", ["f(1)", "[]", "3", '{"x": 1}'])
def test_tool_call_that_is_none(value):
    assert defect({"messages": [{"from": "function_call", "value": value}]}) == "bad_tool_call"


@pytest.mark.parametrize(
    "tools", ['[{"name": "f"}]', [{"name": "f"}], {"name": "f"}, [{"type": "function", "function": {"name": "f"}}]]
)
def test_tools(tools):
    conversation = to_conversation({"prompt": "q", "tools": tools}, "auto", Fields())
    assert orjson.loads(conversation.tools) == [{"type": "function", "function": {"name": "f"}}]


def test_tools_that_are_none():
    assert defect({"prompt": "q", "tools": "f, g"}) == "bad_tools"
    assert defect({"prompt": "q", "tools": [1]}) == "bad_tools"
    assert to_conversation({"prompt": "q", "tools": "[]"}, "auto", Fields()).tools is None


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "messages": [{"role": U, "content": "q"}]},
        {"input_ids": [[1, 2, 3]], "loss_mask": [[False, True, True]]},
        {"input_ids": [1, 2, 3, 0, 0], "labels": [-100, 2, 3, -100, -100], "attention_mask": [1, 1, 1, 0, 0]},
    ],
)
def test_ready_tokens(row):
    conversation = to_conversation(row, "auto", Fields())
    assert (conversation.input_ids, conversation.loss_mask) == ([1, 2, 3], [0, 1, 1])
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2]}, "missing_field"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_tokens"),
        ({"input_ids": [], "loss_mask": []}, "bad_tokens"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "bad_tokens"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad_tokens"),
        ({"input_ids": [1, 1 << 40], "loss_mask": [0, 1]}, "bad_tokens"),
        ({"input_ids": "1 2", "loss_mask": [0, 1]}, "bad_tokens"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1]}, "bad_tokens"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "shifted_labels"),
        ({}, "unknown_format"),
        ({"foo": "bar"}, "unknown_format"),
        (None, "not_an_object"),
        (3, "not_an_object"),
        ([], "bad_messages"),
        ({"messages": []}, "bad_messages"),
        ({"messages": [3]}, "bad_messages"),
        ({"messages": "[1"}, "bad_messages"),
        ({"messages": [{"content": "x"}]}, "unknown_role"),
        ({"question": " "}, "missing_field"),
        ({"instruction": "", "input": ""}, "missing_field"),
        ({"chosen": "an answer to nothing", "rejected": "z"}, "missing_field"),
        ({"system": "s", "messages": [{"role": S, "content": "t"}, {"role": U, "content": "q"}]}, "system_not_first"),
    ],
)
def test_rows_that_cannot_be_used_say_why(row, reason):
    assert defect(row) == reason


def test_system_column_and_equal_system_turn_are_one():
    row = {"system": "s", "messages": [{"role": S, "content": "s "}, {"role": U, "content": "q"}]}
    assert turns(row) == [(S, "s"), (U, "q")]


def test_own_id_is_kept():
    for row_id in ({"id": 7}, {"uuid": "7"}, {"conversation_hash": "7"}):
        assert to_conversation({"prompt": "q", **row_id}, "auto", Fields()).row_id == "7"


MARKED = (
    "user", "assistant", "tool", "tool_call", "### Human: x### Assistant: y", "<s>[INST] x [/INST]", "USER: x", "Q: x\nA: y",
    '<tool_call>{"name": "f"}</tool_call>', "<tool_call>{", "<tool_response>x</tool_response>", '{"name": "f"}', "false", "[[]]",
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(MARKED),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["messages", "conversations", "role", "from", "content", "value", "prompt", "chosen", "text", "input_ids",
             "labels", "loss_mask", "tools", "instances", "history", "replies", "type", "tool_calls", "input", "x",
             "question", "answer", "context", "choices", "label", "weight", "train", "chat_template_kwargs", "completion",
             "name", "function", "arguments", "user", "bot", "xml_tools", "custom_instructions", "parent_id"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(json_values, st.sampled_from(sorted(FORMATS_OF_THE_READER | {"auto"})), st.booleans())
def test_any_json_value_is_a_conversation_or_a_defect(value, form, answers):
    try:
        to_conversation(value, form, Fields(), answers)
    except Defect:
        pass
