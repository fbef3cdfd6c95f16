"""Known public datasets by name: where they are, what their columns are called, which defects to expect.

`preset: open-perfectblend` in the config is enough; keys that the config gives beside it (another `source`, `split`,
`fields`, ...) win. Columns, splits and defects were read from the dataset cards on the Hugging Face Hub.
"""

import difflib
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.config.model import Dataset, Fields
from scripts.lib.core.errors import UserError


@dataclass(frozen=True)
class Preset:
    """What is known of a dataset. `fields` are column names as in the config."""

    source: str
    hub_config: str | None = None
    split: str | None = None
    format: str = "auto"
    fields: dict[str, str] = field(default_factory=dict)
    page_residue: bool = False  # turns were copied off web pages
    ignored_columns: tuple[str, ...] = ()  # personal data, and switches of the model that wrote the answers
    keep: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # column -> the values that are wanted


PRESETS = {
    # No id column; mixes other public sets, UltraChat and evol-codealpaca among them.
    "open-perfectblend": Preset("hf:mlabonne/open-perfectblend", split="train", format="sharegpt"),
    # `seed` is the snippet that inspired the problem, not a part of the prompt.
    "magicoder-oss": Preset("hf:ise-uiuc/Magicoder-OSS-Instruct-75K", split="train", format="question_answer"),
    "magicoder-evol": Preset("hf:ise-uiuc/Magicoder-Evol-Instruct-110K", split="train", format="instruction"),
    # Thoughts stand inline in <think> tags. `hub_config` may also be code, math or science.
    "mixture-of-thoughts": Preset("hf:open-r1/Mixture-of-Thoughts", hub_config="all", split="train", format="messages"),
    # The system prompt asks for the answer tags of the model that wrote it.
    "openthoughts-114k": Preset(
        "hf:open-thoughts/OpenThoughts-114k",
        hub_config="default",
        split="train",
        format="sharegpt",
        ignored_columns=("system",),
    ),
    "openthoughts2": Preset("hf:open-thoughts/OpenThoughts2-1M", split="train", format="sharegpt"),
    # 16 answers per question: as class B, `deduplicate: within` (or across) leaves one of them.
    "openthoughts3": Preset("hf:open-thoughts/OpenThoughts3-1.2M", split="train", format="sharegpt"),
    # Has no split `train`; `prompt` repeats the first message.
    "ultrachat-200k": Preset("hf:HuggingFaceH4/ultrachat_200k", split="train_sft", format="messages"),
    "sharegpt": Preset("hf:Aeala/ShareGPT_Vicuna_unfiltered", format="sharegpt", page_residue=True),
    "sharegpt-vicuna-split": Preset(
        "hf:anon8231489123/ShareGPT_Vicuna_unfiltered/ShareGPT_V3_unfiltered_cleaned_split.json",
        format="sharegpt",
        page_residue=True,
    ),
    "tulu-3": Preset("hf:allenai/tulu-3-sft-mixture", split="train", format="messages"),
    # Every turn holds where and with which browser it was written: only role and content are read.
    "wildchat": Preset(
        "hf:allenai/WildChat-1M",
        split="train",
        format="messages",
        fields={"messages": "conversation", "role": "role", "content": "content"},
        ignored_columns=("hashed_ip", "header", "country", "state"),
        keep={"toxic": (False,), "redacted": (False,)},
    ),
    "lmsys-chat-1m": Preset("hf:lmsys/lmsys-chat-1m", split="train", format="messages", keep={"redacted": (False,)}),
    # `input` is a list of messages; `system_prompt` switches the thinking of the model that answered.
    "nemotron-v1": Preset(
        "hf:nvidia/Llama-Nemotron-Post-Training-Dataset",
        hub_config="SFT",
        format="prompt_response",
        fields={"prompt": "input", "response": "output"},
        ignored_columns=("system_prompt", "reasoning"),
    ),
    # Gated. Splits stem, chat, math, code, multilingual_{ja,de,it,es,fr}; `reasoning` is only "on" or "off".
    "nemotron-v2": Preset(
        "hf:nvidia/Nemotron-Post-Training-Dataset-v2",
        format="messages",
        ignored_columns=("reasoning",),
    ),
    "opc-sft-stage1": Preset("hf:OpenCoder-LLM/opc-sft-stage1", split="train", format="instruction"),
    "magpie-qwen2.5": Preset("hf:Magpie-Align/Magpie-Qwen2.5-Pro-1M-v0.1", split="train", format="sharegpt"),
    "magpie-llama-3.1": Preset("hf:Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", split="train", format="sharegpt"),
    "infinity-instruct": Preset(
        "hf:nebius/Llama-3.1-8B-Instruct-Infinity-Instruct-0625",
        split="train",
        format="messages",
        fields={"messages": "conversation", "response": "generated_message"},
    ),
    "gsm8k": Preset("hf:openai/gsm8k", hub_config="main", split="train", format="question_answer"),
    "hermes-function-calling": Preset(
        "hf:NousResearch/hermes-function-calling-v1", hub_config="func_calling", split="train", format="sharegpt"
    ),
    # Any corpus of ids with labels or loss_mask: only checked.
    "pretokenized": Preset("", format="tokens"),
}


@dataclass(frozen=True)
class Plan:
    """How a dataset is read: its preset with the config laid over it."""

    name: str
    sources: tuple[str, ...]
    format: str
    fields: Fields
    hub_config: str | None
    split: str | None
    revision: str | None
    page_residue: bool
    ignored_columns: frozenset[str]
    keep: dict[str, tuple[Any, ...]]
    answers: bool = True  # whether the source's answers matter: class B never needs them


def plan_of(name: str, dataset: Dataset) -> Plan:
    """The plan of the dataset `name` of the config. Raises UserError for a preset that doesn't exist."""
    preset = Preset("")
    if dataset.preset is not None:
        if dataset.preset not in PRESETS:
            close = difflib.get_close_matches(dataset.preset, PRESETS, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(PRESETS)}"
            raise UserError(f"datasets.{name}.preset: no preset `{dataset.preset}`; {hint}")
        preset = PRESETS[dataset.preset]
    own = dataset.source
    sources = tuple([own] if isinstance(own, str) else own or filter(None, [preset.source]))
    if not sources:
        raise UserError(f"datasets.{name}.source: the preset `{dataset.preset}` needs a `source` beside it")
    if not any(source.startswith("hf:") for source in sources):
        for key in ("hub_config", "split", "revision"):
            if getattr(dataset, key) is not None:
                raise UserError(f"datasets.{name}.{key}: only `hf:` sources have one; name the files in `source`")
    # Configuration and split belong to the preset's own repository, not to a copy elsewhere.
    of_preset = own is None
    return Plan(
        name=name,
        sources=sources,
        format=dataset.format if dataset.format != "auto" else preset.format,
        fields=Fields(**(preset.fields | dataset.fields.model_dump(exclude_none=True))),
        hub_config=dataset.hub_config or (preset.hub_config if of_preset else None),
        split=dataset.split or (preset.split if of_preset else None),
        revision=dataset.revision,
        page_residue=preset.page_residue,
        ignored_columns=frozenset(preset.ignored_columns),
        keep=preset.keep,
        answers=dataset.data_class == "A",
    )
