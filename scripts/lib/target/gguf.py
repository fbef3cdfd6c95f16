"""What a GGUF file tells: its header, and the tokenizer, template and sizes in it. Read without torch and gguf.

gguf.GGUFReader builds several objects per vocabulary entry, which takes seconds at each start of a server.
Layout: the GGUF specification (ggml, docs/gguf.md), version 2 and later. A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves its regular expressions to llama.cpp
(src/llama-vocab.cpp); the Hugging Face forms of those that are known are written out here. The rest of a
byte-level BPE tokenizer (tokens, merges, token types) is in the file.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from scripts.lib.core.errors import UserError
from scripts.lib.target.vocabulary import NAMED_TOKENS

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# gguf's token types
_CONTROL, _USER_DEFINED = 3, 4
_OTHER_NAMES = {
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}  # the last as it is spelled there

_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@dataclass(frozen=True)
class _Pre:
    """How a named pre-tokenizer cuts text. No patterns: GPT-2's own."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # GPT-2's patterns after every digit stands alone
    ignore_merges: bool = False  # a word that is a token is taken whole
    nfc: bool = False


_SMOLLM = _Pre(digits=True)
_LLAMA3 = _Pre((_LLAMA3_WORDS,), ignore_merges=True)
# llama.cpp doesn't compose characters for Qwen; the model's own tokenizer, which it was trained with, does.
_QWEN2 = _Pre((_QWEN_WORDS,), nfc=True)
_PRE: dict[str, _Pre] = {
    "gpt-2": _Pre(),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _Pre((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS)),
}


def read_header(path: Path, arrays: bool = False) -> dict[str, Any]:
    """Key-value pairs of the header; with `arrays`, vocabulary and merges too.

    Without, only numbers, truth values, texts and short numeric arrays such as heads per layer. Raises UserError when
    the file is missing or isn't a GGUF.
    """
    try:
        with open(path, "rb") as file:
            magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version < 2:
                raise ValueError
            pairs = [_pair(file, arrays) for _ in range(count)]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, KeyError, struct.error):
        raise UserError(f"{path}: not a GGUF file of version 2 or later") from None
    return {key: value for key, value in pairs if value is not None}


def _pair(file: BinaryIO, arrays: bool) -> tuple[str, Any]:
    return _text(file), _value(file, _number(file, "<I"), arrays)


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<Q")).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int, arrays: bool) -> Any:
    """A value; None for an array that isn't wanted."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind])
    of, length = _number(file, "<I"), _number(file, "<Q")
    if of == _STRING:
        if arrays:
            return [_text(file) for _ in range(length)]
        for _ in range(length):
            file.seek(_number(file, "<Q"), 1)
        return None
    layout = f"<{length}{_SCALARS[of][1]}"
    data = file.read(struct.calcsize(layout))
    return list(struct.unpack(layout, data)) if arrays or length <= 1024 else None


@dataclass(frozen=True)
class GgufFacts:
    """What a GGUF file tells of its model."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: those that the file names
    eos_ids: list[int]
    template: str | None
    vocab_size: int  # rows of the embedding
    context_length: int | None


def read_gguf(path: Path) -> GgufFacts:
    """Read tokenizer, template and facts of a GGUF file.

    Raises UserError when it is no GGUF, or its tokenizer is of a kind that isn't known here.
    """
    header = read_header(path, arrays=True)
    tokens = header.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise UserError(f"{path}: carries no tokenizer: name one in `model.tokenizer`")
    keys = {name: _OTHER_NAMES.get(name, name.removesuffix("_token")) for name in NAMED_TOKENS}
    numbers = {name: header.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    ends = [header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    vocab_size, context_length = _sizes(header, len(tokens))
    return GgufFacts(
        tokenizer=_byte_level_bpe(path, header, tokens),
        special_tokens={name: tokens[number] for name, number in numbers.items() if number is not None},
        eos_ids=[end for end in ends if end is not None],
        template=header.get("tokenizer.chat_template"),
        vocab_size=vocab_size,
        context_length=context_length,
    )


def read_sizes(path: Path) -> tuple[int | None, int | None]:
    """Embedding rows and context length of a GGUF file, whatever its tokenizer; None for what it doesn't tell."""
    return _sizes(read_header(path), None)


def _sizes(header: dict[str, Any], tokens: int | None) -> tuple[Any, Any]:
    architecture = header.get("general.architecture")
    return header.get(f"{architecture}.vocab_size", tokens), header.get(f"{architecture}.context_length")


def _byte_level_bpe(path: Path, header: dict[str, Any], tokens: list[str]) -> Tokenizer:
    model, pre_name = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre_name not in _PRE:
        kind = f"tokenizer kind `{model}`" if model != "gpt2" else f"pre-tokenizer `{pre_name}`"
        raise UserError(
            f"{path}: {kind} can't be rebuilt from a GGUF file (known: gpt2 with {', '.join(sorted(_PRE))}): "
            "name the model's Hugging Face id or folder in `model.tokenizer`"
        )
    pre = _PRE[pre_name]
    # A merge is "left right"; left itself may start with a blank only in files that aren't byte-level.
    merges = [
        (merge[: (cut := merge.index(" ", 1))], merge[cut + 1 :]) for merge in header.get("tokenizer.ggml.merges", [])
    ]
    tokenizer = Tokenizer(
        models.BPE({text: token for token, text in enumerate(tokens)}, merges, ignore_merges=pre.ignore_merges)
    )
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    kinds = header.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(tokens, kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer
