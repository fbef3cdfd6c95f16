"""Conversations in one text, in the markers of many trainers; texts that only look like it."""

import pytest

from scripts.lib.prompts.defects import Defect
from scripts.lib.prompts.sources.transcripts import turns_in

TRANSCRIPTS = {
    "guanaco": "### Human: How do owls hunt?### Assistant: They listen.### Human: At night?### Assistant: Mostly.",
    "hashes, lines": "### User:\nHow do owls hunt?\n\n### Assistant:\nThey listen.\n\n### User:\nAt night?\n\n### Assistant:\nMostly.",
    "ChatML": "<|im_start|>user\nHow do owls hunt?<|im_end|>\n<|im_start|>assistant\nThey listen.<|im_end|>\n"
    "<|im_start|>user\nAt night?<|im_end|>\n<|im_start|>assistant\nMostly.<|im_end|>\n",
    "Zephyr": "<|user|>\nHow do owls hunt?</s>\n<|assistant|>\nThey listen.</s>\n<|user|>\nAt night?</s>\n<|assistant|>\nMostly.</s>",
    "Open Assistant": "<|prompter|>How do owls hunt?<|endoftext|><|assistant|>They listen.<|endoftext|>"
    "<|prompter|>At night?<|endoftext|><|assistant|>Mostly.<|endoftext|>",
    "Llama 2": "<s>[INST] How do owls hunt? [/INST] They listen. </s><s>[INST] At night? [/INST] Mostly. </s>",
    "Llama 3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow do owls hunt?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nThey listen.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "At night?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nMostly.<|eot_id|>",
    "Gemma": "<bos><start_of_turn>user\nHow do owls hunt?<end_of_turn>\n<start_of_turn>model\nThey listen.<end_of_turn>\n"
    "<start_of_turn>user\nAt night?<end_of_turn>\n<start_of_turn>model\nMostly.<end_of_turn>\n",
    "Vicuna": "USER: How do owls hunt? ASSISTANT: They listen.</s>USER: At night? ASSISTANT: Mostly.</s>",
    "lines": "Human: How do owls hunt?\nAssistant: They listen.\nHuman: At night?\nAssistant: Mostly.",
    "Anthropic": "\n\nHuman: How do owls hunt?\n\nAssistant: They listen.\n\nHuman: At night?\n\nAssistant: Mostly.",
    "glaive": "USER: How do owls hunt?\n\n\nASSISTANT: They listen. <|endoftext|>\n\n\nUSER: At night?\n\n\nASSISTANT: Mostly. <|endoftext|>",
    "OIG": "<human>: How do owls hunt?\n<bot>: They listen.\n<human>: At night?\n<bot>: Mostly.",
    "Baize": "[|Human|] How do owls hunt?\n[|AI|] They listen.\n[|Human|] At night?\n[|AI|] Mostly.",
    "OpenChat": "GPT4 Correct User: How do owls hunt?<|end_of_turn|>GPT4 Correct Assistant: They listen.<|end_of_turn|>"
    "GPT4 Correct User: At night?<|end_of_turn|>GPT4 Correct Assistant: Mostly.<|end_of_turn|>",
    "Koala": "BEGINNING OF CONVERSATION: USER: How do owls hunt? GPT: They listen.</s>USER: At night? GPT: Mostly.</s>",
    "GLM": "[gMASK]<sop><|user|>\nHow do owls hunt?<|assistant|>\nThey listen.<|user|>\nAt night?<|assistant|>\nMostly.",
    "Markdown": "**User:** How do owls hunt?\n\n**Assistant:** They listen.\n\n**User:** At night?\n\n**Assistant:** Mostly.",
    "DeepSeek": "<｜begin▁of▁sentence｜><｜User｜>How do owls hunt?<｜Assistant｜>They listen.<｜end▁of▁sentence｜>"
    "<｜User｜>At night?<｜Assistant｜>Mostly.<｜end▁of▁sentence｜>",
}
OWLS = [("user", "How do owls hunt?"), ("assistant", "They listen."), ("user", "At night?"), ("assistant", "Mostly.")]


def said(text):
    found = turns_in(text)
    return None if found is None else [(turn.role, turn.content) for turn in found]


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_turns(name):
    assert said(TRANSCRIPTS[name]) == OWLS


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_without_its_last_answer_it_is_a_prompt(name):
    assert said(TRANSCRIPTS[name].rsplit("Mostly.", 1)[0]) == OWLS[:3]


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]", [("system", "Be brief."), ("user", "Hi")]),
        ("<|system|>\nBe brief.</s>\n<|user|>\nHi</s>", [("system", "Be brief."), ("user", "Hi")]),
        ("### System:\nBe brief.\n\n### User:\nHi", [("system", "Be brief."), ("user", "Hi")]),
        ("System: Be brief.\nUser: Hi\nAssistant: Yes?", [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?")]),
        ("### Instruction:\nAdd.\n\n### Input:\n2, 3\n\n### Response:\n5", [("user", "Add.\n\n2, 3"), ("assistant", "5")]),
        (
            "Below is an instruction that describes a task.\n\n### Instruction:\nAdd.\n\n### Response:\n5",
            [("system", "Below is an instruction that describes a task."), ("user", "Add."), ("assistant", "5")],
        ),
        (
            "A chat between a user and an assistant. USER: Hi ASSISTANT: Yes?</s>",
            [("system", "A chat between a user and an assistant."), ("user", "Hi"), ("assistant", "Yes?")],
        ),
        ("### Human: What does ### Input: mean?### Assistant: x", [("user", "What does ### Input: mean?"), ("assistant", "x")]),
        ("<|user|>\nHi", [("user", "Hi")]),
    ],
)  # fmt: skip
def test_systems_and_inputs(text, turns):
    assert said(text) == turns


@pytest.mark.parametrize(
    "text",
    [
        "How do owls hunt?",
        "Write a dialogue:\nHuman: Hi\nAssistant: Hello",
        "System: Windows 11",
        "# Instruction\nAdd.",
        "### Question:\nWhat?\n### Answer: (use the format)",
        "What does [INST] mean?",
        "What is <|im_start|>user?",
        "<|endoftext|>",
        "<user>: is a tag?"[1:],
        "",
    ],
)
def test_ordinary_texts(text):
    assert said(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "Human: How do owls hunt?",
        "### Assistant: They listen.",
        "<|im_start|>narrator\nOnce<|im_end|>",
        "### Input:\nx\n\n### Response:\ny",
        "<|start|>user<|message|>How?<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>How?<|END_OF_TURN_TOKEN|>",
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]How?[/INST]",
    ],
)
def test_what_opens_with_a_marker_and_can_not_be_split_is_refused(text):
    with pytest.raises(Defect) as raised:
        turns_in(text)
    assert raised.value.reason == "transcript"


@pytest.mark.parametrize(
    "text",
    [
        "Question: How do owls hunt?\nAnswer: They listen.\n\nQuestion: At night?\nAnswer: Mostly.",
        "Q: How do owls hunt?\nA: They listen.\nQ: At night?\nA: Mostly.",
        "Instruct: How do owls hunt?\nOutput: They listen.\nInstruct: At night?\nOutput: Mostly.",
    ],
)
def test_question_and_answer_are_turns_in_a_document_only(text):
    assert said(text) is None
    assert [(turn.role, turn.content) for turn in turns_in(text, document=True)] == OWLS
    assert turns_in(text.rsplit("Mostly.", 1)[0], document=True) is None  # an example to go on with
