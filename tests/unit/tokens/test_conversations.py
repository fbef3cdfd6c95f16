"""Ready conversations become what the target would have written, turn by turn; ready tokens pass through."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.lib.config.model import Validation
from scripts.lib.core.records import Completion, Message, Prompt, Sample, Turn
from scripts.lib.target import turn_format
from scripts.lib.target.model import Target
from scripts.lib.target.output import split_output
from scripts.lib.tokens.completions import from_completion
from scripts.lib.tokens.conversations import from_conversations
from scripts.lib.validated.gates import Gates
from tests.dialogues import DATASET, ID
from tests.families import FAMILIES, TEXT, published, target

THINKING = [name for name, family in FAMILIES.items() if family.written is not None]

words = st.sampled_from([*TEXT.split(" "), "\n", "\n\n", " 4.\n", "é́", "☃", "", "{{ x }}", "</s>", "<b>", "12"])
texts = st.lists(words, min_size=1, max_size=12).map(" ".join)


def conversation(*texts: str, thoughts: tuple[str | None, ...] = (), system: str | None = None) -> Prompt:
    messages = [] if system is None else [Message("system", system)]
    for number, text in enumerate(texts):
        thought = thoughts[number // 2] if thoughts and number % 2 else None
        messages.append(Message("assistant" if number % 2 else "user", text, thought))
    return Prompt(id=ID, dataset="d", source="s:1", key="k", messages=messages)


def naive(model: Target, prompt: Prompt, name: str) -> list[Sample]:
    """Class A without any shortcut: every prompt rendered and tokenized whole, every answer tokenized by itself."""
    family = FAMILIES[name]
    if family.trims:
        shown = [replace(m, content=m.content.strip()) if m.role == "assistant" else m for m in prompt.messages]
        prompt = replace(prompt, messages=shown)
    turns = []
    for position, message in enumerate(prompt.messages):
        if message.role != "assistant":
            continue
        written = family.written if message.reasoning is not None and family.written else family.written_plain
        answer = written.replace("{thought}", message.reasoning or "").replace("{content}", message.content)
        turns.append(
            Turn(
                model.render(prompt.messages[:position]),
                model.encode(answer),
                "stop",
                message.content,
                message.reasoning,
            )
        )
    completion = Completion(prompt.id, "d", "ok", messages=prompt.messages, turns=turns)
    return from_completion(completion, None, DATASET)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_conversations_come_out_as_if_tokenized_turn_by_turn(name: str, data: st.DataObject):
    model = target(name)
    count = data.draw(st.integers(1, 3))
    plain = texts.filter(lambda text: text.strip())
    turns = [data.draw(plain) for _ in range(2 * count)]
    thoughts = tuple(data.draw(st.none() | plain.map(str.strip)) for _ in range(count))
    if FAMILIES[name].written is None:
        thoughts = (None,) * count
    prompt = conversation(*turns, thoughts=thoughts, system=data.draw(st.none() | plain))
    got = list(from_conversations(model, [prompt]))
    expected = naive(model, prompt, name)
    assert [(sample.id, sample.input_ids, sample.loss_mask) for sample in got] == [
        (sample.id, sample.input_ids, sample.loss_mask) for sample in expected
    ]
    assert all(sample.ids_origin == "rendered" and sample.outcome == "kept" for sample in got)


def test_answers_that_end_in_a_blank_merge_where_the_template_trims_them():
    """Llama's shows `Yes.` for `Yes. `: six hundred turns were six hundred samples."""
    model = target("llama-3.1")
    (sample,) = from_conversations(model, [conversation(*["Really?", "Yes. \n"] * 5)])
    assert supervised(model, sample) == "Yes.<|eot_id|>" * 5


@pytest.mark.parametrize("name", FAMILIES)
def test_which_templates_trim(name: str):
    assert turn_format.of(target(name)).trims == FAMILIES[name].trims


@pytest.mark.parametrize("name", THINKING)
def test_the_last_thought_of_a_conversation_is_kept(name: str):
    model = target(name)
    prompt = conversation("What is 2+2?", "4.", thoughts=("Simple.",))
    (sample,) = from_conversations(model, [prompt])
    supervised = [token for token, mask in zip(sample.input_ids, sample.loss_mask) if mask]
    written = FAMILIES[name].written or ""
    assert supervised == model.encode(written.replace("{thought}", "Simple.").replace("{content}", "4."))
    assert split_output(model, model.render(prompt.messages[:1]), supervised).reasoning == "Simple."


@pytest.mark.parametrize("name", [name for name in THINKING if name != "gpt-oss"])
@pytest.mark.parametrize(
    "content", ["<think>\nSimple.\n</think>\n\n4.", "<think>Simple.</think>4.", "Simple.</think>4."]
)
def test_thoughts_between_tags_in_the_content_are_understood(name: str, content: str):
    model = target(name)
    (inline,) = from_conversations(model, [conversation("What is 2+2?", content)])
    (apart,) = from_conversations(model, [conversation("What is 2+2?", "4.", thoughts=("Simple.",))])
    assert inline.input_ids == apart.input_ids
    assert inline.messages[-1] == Message("assistant", "4.", "Simple.")


THINK = ("<think>", "</think>")


def learnt(model: Target, prompt: Prompt) -> tuple[str, list[str]]:
    (sample,) = from_conversations(model, [prompt])
    return supervised(model, sample), sample.flags


def test_thoughts_of_a_model_whose_tags_are_text(tmp_path: Path):
    """Skywork-R1V's generation prompt ends with the tag, which its tokenizer doesn't know (Skywork-R1V issue 42)."""
    model = published("Skywork-Skywork-R1V3-38B", tmp_path, lacking=THINK)
    written = "Simple.\n</think>\n\n4.<|im_end|>", []
    assert learnt(model, conversation("What is 2+2?", "<think>\nSimple.\n</think>\n\n4.")) == written
    assert learnt(model, conversation("What is 2+2?", "4.", thoughts=("Simple.",))) == written


@pytest.mark.parametrize(("template", "end"), [("nvidia-Llama-3.1-Nemotron-Nano-8B-v1", "<|eot_id|>")])
def test_a_thought_in_the_content_stays_text_where_the_template_knows_none(template: str, end: str, tmp_path: Path):
    """Llama-Nemotron's renders the content as it is (vllm PR 21041)."""
    model = published(template, tmp_path, "llama-3.1")
    content = "<think>\nSimple.\n</think>\n\n4."
    assert learnt(model, conversation("What is 2+2?", content)) == (content + end, ["thought_in_text"])
    assert learnt(model, conversation("What is 2+2?", "4.", thoughts=("Simple.",))) == (
        "4." + end,
        ["reasoning_dropped"],
    )


@pytest.mark.parametrize("content", ["<thinking>Hm.</thinking>4.", "◁think▷Hm.◁/think▷4.", "<|x|>Hm.<|/x|>4."])
def test_what_looks_like_a_thought_is_flagged(content: str):
    """Kimi-Dev and Kimi-VL write the second, which no list of ours holds."""
    assert learnt(target("llama-3.1"), conversation("What is 2+2?", content))[1] == ["thought_in_text"]


@pytest.mark.parametrize("content", ["<table><tr></tr></table>", "<answer>4</answer>", "[1] It is 4. [/1]", "< 4 >"])
def test_markup_is_no_thought(content: str):
    assert learnt(target("llama-3.1"), conversation("What is 2+2?", content))[1] == []


def test_a_thought_that_the_model_has_no_place_for_is_dropped_and_flagged():
    model = target("llama-3.1")
    (sample,) = from_conversations(model, [conversation("hi", "yes", thoughts=("hm",))])
    assert sample.flags == ["reasoning_dropped"]
    assert "hm" not in model.decode(sample.input_ids)


def test_a_conversation_that_the_template_refuses_is_kept_with_its_reason():
    model = target("gemma-3")
    prompt = Prompt(
        id=ID,
        dataset="d",
        source="s:1",
        key="k",
        messages=[Message("user", "a"), Message("user", "b"), Message("assistant", "c")],
    )
    (sample,) = from_conversations(model, [prompt])
    assert (sample.input_ids, sample.flags) == ([], ["template_error"])
    check, detail = Gates(model, Validation()).refuse(sample) or ("", "")
    assert check == "template_error"
    assert "alternate" in detail


CALLS = '[{"id":"functions.count:0","type":"function","function":{"name":"count","arguments":"{\\"sacks\\": 3}"}}]'


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (
            "kimi-k2.5",
            "hm</think>Let me count.<|tool_calls_section_begin|><|tool_call_begin|>functions.count:0"
            '<|tool_call_argument_begin|>{"sacks": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        ),
        (
            "qwen3",
            '<think>\nhm\n</think>\n\nLet me count.\n<tool_call>\n{"name": "count", "arguments": {"sacks": 3}}\n'
            "</tool_call><|im_end|>",
        ),
        (
            "glm-4.5",
            "\n<think>hm</think>\nLet me count.\n<tool_call>count\n<arg_key>sacks</arg_key>\n<arg_value>3</arg_value>\n"
            "</tool_call><|observation|>",
        ),
    ],
)
def test_tool_calls_are_written_as_the_template_writes_them(name: str, written: str):
    model = target(name)
    prompt = conversation("How many?", "Let me count.", thoughts=("hm",))
    prompt.messages[-1].tool_calls = CALLS
    (sample,) = from_conversations(model, [prompt])
    supervised = [token for token, mask in zip(sample.input_ids, sample.loss_mask) if mask]
    assert model.decode(supervised) == written
    assert supervised == model.encode(written)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (
            "kimi-k2.5",
            "hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.count:0"
            '<|tool_call_argument_begin|>{"sacks": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        ),
        (
            "qwen3-2507-thinking",
            'hm\n</think>\n\n<tool_call>\n{"name": "count", "arguments": {"sacks": 3}}\n</tool_call><|im_end|>',
        ),
        (
            "deepseek-v3.1",
            "hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>count<｜tool▁sep｜>"
            '{"sacks": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.count<|channel|>commentary json"
            '<|message|>{"sacks": 3}<|call|>',
        ),
        (
            "minimax-m2",
            'hm\n</think>\n\n<minimax:tool_call>\n<invoke name="count">\n<parameter name="sacks">3</parameter>\n'
            "</invoke>\n</minimax:tool_call>[e~[",
        ),
    ],
)
def test_tool_calls_without_content(name: str, written: str):
    model = target(name)
    prompt = conversation("How many?", "", thoughts=("hm",))
    prompt.messages[-1].tool_calls = CALLS
    (sample,) = from_conversations(model, [prompt])
    assert model.decode([token for token, mask in zip(sample.input_ids, sample.loss_mask) if mask]) == written


def test_a_tool_call_that_the_format_has_no_place_for_is_refused():
    model = target("llama-3.1")
    prompt = conversation("How many?", "Let me count.")
    prompt.messages[-1].tool_calls = CALLS
    (sample,) = from_conversations(model, [prompt])
    assert Gates(model, Validation()).refuse(sample) == (
        "template_error",
        "the chat template has no place for a part of the conversation",
    )


def test_ready_tokens_pass_through():
    model = target("llama-3.1")
    prompt = Prompt(id=ID, dataset="d", source="s:1", key="k", input_ids=[128000, 310, 311], loss_mask=[0, 1, 1])
    other = replace(conversation("hi", "yes"), id="f" * 32)
    samples = list(from_conversations(model, [prompt, other, prompt]))
    assert [sample.ids_origin for sample in samples] == ["given", "rendered", "given"]
    assert (samples[0].input_ids, samples[0].loss_mask) == ([128000, 310, 311], [0, 1, 1])


def unlearnt(model: Target, *trainable: bool, thought: str | None = None) -> list[Sample]:
    """Samples of a conversation of which some answers are not to be learnt."""
    texts = [text for number in range(len(trainable)) for text in (f"Ask {number}", f"Answer {number}.")]
    prompt = conversation(*texts, thoughts=(thought,) * len(trainable))
    answers = [message for message in prompt.messages if message.role == "assistant"]
    for message, learnt in zip(answers, trainable):
        message.trainable = learnt
    return list(from_conversations(model, [prompt]))


def supervised(model: Target, sample: Sample) -> str:
    return model.decode([token for token, mask in zip(sample.input_ids, sample.loss_mask) if mask])


def test_an_answer_that_is_not_to_be_learnt_stays_as_context():
    model = target("llama-3.1")
    (sample,) = unlearnt(model, False, True)
    (whole,) = unlearnt(model, True, True)
    assert sample.input_ids == whole.input_ids
    assert supervised(model, sample) == "Answer 1.<|eot_id|>"
    assert Gates(model, Validation()).refuse(sample) is None


def test_nothing_follows_the_last_answer_that_is_learnt():
    model = target("llama-3.1")
    (sample,) = unlearnt(model, True, False)
    (first,) = unlearnt(model, True)
    assert (sample.input_ids, sample.loss_mask, sample.messages) == (first.input_ids, first.loss_mask, first.messages)


def test_turns_that_do_not_merge_and_teach_nothing_give_no_sample():
    """Kimi's template deletes earlier thoughts: one sample per turn."""
    model = target("kimi-k2.5")
    turns = unlearnt(model, True, True, True, thought="Hm.")
    assert len(turns) == 3
    first, last = unlearnt(model, True, False, True, thought="Hm.")
    assert (first.input_ids, first.loss_mask) == (turns[0].input_ids, turns[0].loss_mask)
    assert (last.input_ids, last.loss_mask, last.id) == (turns[2].input_ids, turns[2].loss_mask, f"{ID}/2")


@pytest.mark.parametrize("name", ["llama-3.1", "kimi-k2.5"])
def test_a_row_without_anything_to_learn_is_refused_with_its_reason(name: str):
    model = target(name)
    (sample,) = unlearnt(model, False, False)
    assert (Gates(model, Validation()).refuse(sample) or ("",))[0] == "no_supervised_tokens"


def test_memory_follows_one_row():
    """Rows of a thousand times the size must not wait for 255 others."""
    model = target("llama-3.1")
    begun = 0

    def rows():
        nonlocal begun
        for _ in range(8):
            begun += 1
            yield conversation("Say it all.", "many words " * 100_000)

    next(iter(from_conversations(model, rows())))
    assert begun <= 3
