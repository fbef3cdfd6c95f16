"""Which tokens of a vocabulary steer a conversation: the ids that a user's text must never produce.

Neither "special" nor "added" tells them apart. Qwen's `</think>`, Kimi's `<|tool_calls_section_begin|>`,
DeepSeek's `<｜Assistant｜>` and gpt-oss's `<|end|>` are not flagged special, while Gemma-3 has 6,415 added
tokens that are ordinary text (`\\n\\n`, `<table>`). So the names are written out here, by what they do, and
added tokens that the chat template itself spells are taken as well.
"""

import re
from collections.abc import Mapping

from scripts.lib.target.thoughts import TAGS

# Role in the conversation -> token texts, over all families. Only those that are added tokens of the
# tokenizer at hand count: in another vocabulary `<think>` is five ordinary tokens.
KNOWN: dict[str, tuple[str, ...]] = {
    "chat": (
        # ChatML: Qwen, SmolLM, MiniMax-01, Hermes
        "<|im_start|>", "<|im_end|>", "<|im_sep|>",
        # Kimi
        "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
        # Llama 3 and 4
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
        "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|step|>",
        # DeepSeek
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|EOT|>",
        # Gemma
        "<start_of_turn>", "<end_of_turn>",
        # gpt-oss (harmony)
        "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>", "<|startoftext|>",
        "<|endoftext|>", "<|endofprompt|>",
        # GLM, Phi, Zephyr, Granite
        "[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        "<|start_of_role|>", "<|end_of_role|>", "<|developer|>",
        # MiniMax
        "]~!b[", "]~b]", "[e~[", "<beginning_of_sentence>", "<end_of_sentence>",
        # Mistral
        "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[PREFIX]",
        "[SUFFIX]", "[MIDDLE]",
        # Command R
        "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
        "[BOS]", "[EOS]", "[EOT]", "[PAD]", "<bos>", "<eos>",
    ),
    "think": (
        "<think>", "</think>", "<|begin_of_thought|>", "<|end_of_thought|>", "[THINK]", "[/THINK]", "/nothink",
        "<seed:think>", "</seed:think>", "<|START_THINKING|>", "<|END_THINKING|>",
    ),
    "tool": (
        "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>", "｜DSML｜", "<|python_tag|>", "<|python_start|>",
        "<|python_end|>", "<|call|>", "[TOOL_CALLS]", "[TOOL_CONTENT]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]",
        "[CALL_ID]", "<minimax:tool_call>", "</minimax:tool_call>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
        "<|/tool_call|>", "<|tool_response|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>",
        "<|END_TOOL_RESULT|>",
    ),
    "media": (
        "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>",
        "<|audio_start|>", "<|audio_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
        "<|quad_start|>", "<|quad_end|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
        "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_audio>", "<end_of_audio>",
        "<audio_soft_token>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|begin_of_image|>",
        "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>",
        "<|video|>", "<|audio|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[AUDIO]", "[BEGIN_AUDIO]",
    ),
}  # fmt: skip

# Tokens that end an assistant's turn wherever they exist, whatever the tokenizer's one `eos_token` is:
# Llama-3.1 ends turns with <|eot_id|> while its base eos is <|end_of_text|>, Kimi with <|im_end|> while it is [EOS].
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
    "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "[e~[", "[EOS]", "[EOT]", "<|END_OF_TURN_TOKEN|>", "<eos>",
)  # fmt: skip
# Ends a turn of Phi and Zephyr, but only a channel's message where <|return|> exists (gpt-oss).
_END = "<|end|>"

_TOOL_OPENERS = (
    "<tool_call>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<|python_tag|>", "<|python_start|>", "<|call|>", "[TOOL_CALLS]", "<minimax:tool_call>", "<|tool_call|>",
    "<|START_ACTION|>", "｜DSML｜",
)  # fmt: skip

_MARKER = re.compile(r"[<\[\]｜]\S+[>\]\[｜]")


def structural_tokens(added: Mapping[str, int], template: str, always: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Role -> {token text: id} of every token that steers a conversation.

    `added` are the tokenizer's added tokens, `always` the ones that count whatever their name (bos, eos).
    The role `template` holds what the chat template spells and no list knows.
    """
    found = {role: {text: added[text] for text in texts if text in added} for role, texts in KNOWN.items()}
    listed = {text for tokens in found.values() for text in tokens}
    found["template"] = {
        text: token
        for text, token in added.items()
        # A template also spells line breaks and words that are added tokens of Gemma: only markers count.
        if text not in listed and _MARKER.fullmatch(text) and text in template
    }
    listed |= found["template"].keys()
    found["text"] = {text: token for text, token in always.items() if text not in listed}
    return {role: dict(sorted(tokens.items(), key=lambda item: item[1])) for role, tokens in found.items()}


def turn_ends(added: Mapping[str, int]) -> set[int]:
    """Ids that end an assistant's turn by their name."""
    ends = {added[text] for text in _TURN_ENDS if text in added}
    if _END in added and "<|return|>" not in added:
        ends.add(added[_END])
    return ends


def tool_openers(added: Mapping[str, int]) -> list[int]:
    """Ids that open a tool call (or, in gpt-oss, close one)."""
    return sorted({added[text] for text in _TOOL_OPENERS if text in added})


def think_pair(added: Mapping[str, int], template: str) -> tuple[int, int] | None:
    """Ids of the tags around a thought; None when the vocabulary has no such pair.

    With several pairs, the one that the template spells.
    """
    pairs = [pair for pair in TAGS if pair[0] in added and pair[1] in added]
    pairs.sort(key=lambda pair: pair[1] not in template)
    return (added[pairs[0][0]], added[pairs[0][1]]) if pairs else None
