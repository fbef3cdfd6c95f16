"""The target folder: what it tells, what it refuses, and ids that are the real engine's."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.target.chat_template import frozen_template
from scripts.lib.target.location import EMBEDDED
from scripts.lib.target.model import TemplateError, load_target
from scripts.lib.target.prepare import prepare_target
from tests.families import FAMILIES, build, target, template


def config(**model) -> Config:
    return parse_config({"model": model, "datasets": {"d": {"class": "B", "source": "x"}}}, "test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A local model folder like that of a Hugging Face model."""
    return build(FAMILIES["qwen3"], tmp_path / "model")


def edit(path: Path, **values) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def test_facts(folder: Path, tmp_path: Path):
    model = prepare_target(config(name=str(folder), revision="abc"), tmp_path / "target")
    assert (model.vocab_size, model.context_length, model.revision) == (151936, 32768, "abc")
    assert model.eos_ids == {151643, 151645}
    assert (model.think_open_id, model.think_close_id, model.tool_ids) == (151667, 151668, {151657})
    assert model.bos_id is None
    assert {151644, 151645, 151652, 151655, 151657, 151665, 151668} <= model.structural_ids
    again = load_target(tmp_path / "target")
    assert again.facts == model.facts
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == [
        "chat_template.jinja",
        "target.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_folder_is_the_same_every_time(folder: Path, tmp_path: Path):
    for name in ("one", "two"):
        prepare_target(config(name=str(folder)), tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_ids_are_those_of_transformers(folder: Path, tmp_path: Path):
    """A trainer that opens results/target gets the same ids."""
    model = prepare_target(config(name=str(folder)), tmp_path / "target")
    messages = [
        Message("system", "Be brief."),
        Message("user", "Hello 123\n\n"),
        Message("assistant", "4."),
        Message("user", "é?"),
    ]
    plain = [{"role": message.role, "content": message.content} for message in messages]
    for place in (folder, tmp_path / "target"):
        tokenizer = AutoTokenizer.from_pretrained(place)
        assert tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"] == model.render(messages)


def test_ids_above_the_length_of_the_tokenizer():
    """Kimi's control tokens lie behind a gap: `len(tokenizer)` says nothing about the largest id."""
    model = target("kimi-k2.5")
    prompt = model.render([Message("user", "hi")])
    assert max(prompt) == 163606
    assert model.vocab_size == 163840
    assert model._backend is not None
    assert model._backend.get_vocab_size() < 2000


@pytest.mark.parametrize("name", FAMILIES)
def test_every_prompt_starts_with_one_bos(name: str):
    model = target(name)
    prompt = model.render(
        [Message("system", "s"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    )
    bos = FAMILIES[name].bos
    if bos is not None and prompt[0] == FAMILIES[name].tokens[bos]:
        assert model.bos_id == prompt[0]
    if model.bos_id is not None:
        assert prompt.count(model.bos_id) == 1
    assert (model.bos_id is None) == (name.startswith(("kimi", "qwen", "glm", "smollm", "gpt-oss")))


def test_gpt_oss_sees_the_frozen_date():
    text = target("gpt-oss").render_text([Message("user", "hi")])
    assert "Current date: 2026-01-01" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", '{{ "05 Mar 2026" }}'),
        ('{%- set today = strftime_now("%Y-%m-%d") %}', '{%- set today = "2026-03-05" %}'),
        ("{% if strftime_now is defined %}x{% endif %}", "{% if strftime_now is defined %}x{% endif %}"),
        ("{{ strftime_now(format='%B') }}", '{{ "March" }}'),
    ],
)
def test_clocks_stand_still(source: str, expected: str):
    assert frozen_template(source, "2026-03-05") == expected


def test_a_clock_that_cannot_be_frozen_is_refused():
    with pytest.raises(UserError, match=r"model\.chat_template"):
        frozen_template("{{ strftime_now(wanted) }}", "2026-03-05")


def test_llama_3_2_shows_the_pinned_date(tmp_path: Path):
    build(FAMILIES["llama-3.1"], tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(template("meta-llama-Llama-3.2-3B-Instruct"))
    model = prepare_target(config(name=str(tmp_path / "model"), date="2026-03-05"), tmp_path / "target")
    assert "Today Date: 05 Mar 2026" in model.render_text([Message("user", "hi")])


def test_llama_3_1_keeps_its_own_fixed_date_unless_told():
    assert "Today Date: 26 Jul 2024" in target("llama-3.1").render_text([Message("user", "hi")])


def test_a_template_without_a_date_of_its_own_gets_one(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").write_text("{{ date_string }}: {{ messages[0].content }}")
    model = prepare_target(config(name=str(folder)), tmp_path / "target")
    assert model.render_text([Message("user", "hi")]) == "01 Jan 2026: hi"


def test_pinned_variables_reach_the_template():
    assert target("qwen3-no-think").render([Message("user", "hi")])[-4:] == [
        151667,
        *target("qwen3").encode("\n\n"),
        151668,
        *target("qwen3").encode("\n\n"),
    ]


def test_a_row_has_template_variables_of_its_own():
    model = target("qwen3")
    own = model.render_text([Message("user", "Hi")], None, '{"enable_thinking": false}')
    assert own == target("qwen3-no-think").render_text([Message("user", "Hi")])
    assert own != model.render_text([Message("user", "Hi")])


def test_a_tools_turn_says_which_call_it_answers():
    """Kimi heads a result with the id of its call, and takes the name for its role."""
    calls = '[{"id": "functions.sum:0", "type": "function", "function": {"name": "sum", "arguments": "{}"}}]'
    asked = [Message("user", "2 + 3?"), Message("assistant", "", None, calls)]
    result = Message("tool", "5", name="sum", tool_call_id="functions.sum:0")
    text = target("kimi-k2.5").render_text([*asked, result])
    assert "<|im_system|>sum<|im_middle|>## Return of functions.sum:0\n5<|im_end|>" in text


def test_tools_reach_the_template():
    tools = '[{"type":"function","function":{"name":"count_sacks","description":"Counts.","parameters":{"type":"object","properties":{}}}}]'
    for name in ("kimi-k2.5", "qwen3", "deepseek-v3.1", "llama-3.1", "gpt-oss", "glm-4.5", "minimax-m2"):
        assert ("count_sacks" in target(name).render_text([Message("user", "hi")], tools)) == (name != "deepseek-v3.1")


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("gemma-3", [Message("user", "a"), Message("user", "b")]),  # roles must alternate
        ("kimi-k2.5", [Message("user", "\ud800")]),  # not Unicode: tokenizers raise TypeError
        ("qwen3", []),
    ],
)
def test_the_templates_refusal_is_one_error(name: str, messages: list[Message]):
    with pytest.raises(TemplateError):
        target(name).render(messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_that_fails_on_harmless_text_is_the_only_source_of_errors(name: str):
    """Odd but valid text comes through, whatever the template does with it."""
    model = target(name)
    for text in ("", " ", "\n\n", "{{ messages }}", "{% raw %}", "a\u0000b", "\u2028", "é" * 1000, "'\"\\"):
        assert model.render([Message("user", text)])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_typed_control_token_is_found_wherever_it_stands(name: str):
    model = target(name)
    for text, token in model.structural_texts.items():
        for typed in (text, f"x{text}", f"{text}y", f"a b{text}c d", f"é\n{text}\n", text * 2, f"☃ {text} 猫"):
            assert token in model.structural_in(typed), typed
            assert token in model.render([Message("user", typed)]), typed


@pytest.mark.parametrize("name", FAMILIES)
def test_ordinary_text_holds_no_control_tokens(name: str):
    model = target(name)
    for text in (
        "<table>\n\n<b>x</b>\n\n\n",
        "if a < b and c > d: x[0] |= 1",
        "<unused0>",
        "[INST",
        "<|im_",
        "|>",
        "<div>",
    ):
        assert model.structural_in(text) == []


def test_gemmas_added_words_are_text_and_its_markers_are_not():
    model = target("gemma-3")
    assert {"<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<bos>", "<eos>"} == set(model.structural_texts)


def test_a_token_that_the_template_spells_counts_though_no_list_knows_it(folder: Path, tmp_path: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for added in tokenizer["added_tokens"]:
        if added["content"] == "<|image_pad|>":
            added["content"] = "<|house_mark|>"
    tokenizer["model"]["vocab"]["<|house_mark|>"] = tokenizer["model"]["vocab"].pop("<|image_pad|>")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    unspelled = prepare_target(config(name=str(folder)), tmp_path / "without")
    assert "<|house_mark|>" not in unspelled.structural_texts
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(source + "{#- -#}{{- '<|house_mark|>' if false else '' -}}")
    spelled = prepare_target(config(name=str(folder)), tmp_path / "with")
    assert spelled.facts.structural["template"] == {"<|house_mark|>": 151655}


def test_separable_is_the_truth_about_seams():
    model = target("qwen3")
    for left, right in [
        ("assistant\n", "\nHi"),
        ("assistant\n", "Hi"),
        ("ans", "wer"),
        ("<|im_end|>", "\n"),
        ("", "x"),
        ("12", "3"),
    ]:
        together = model.encode(left + right) == model.encode(left) + model.encode(right)
        assert model.separable(left, right) == together
    assert not model.separable("assistant\n", "\nHi")
    assert model.separable("<|im_end|>", "\n\n")


# Where models come from


def test_a_vocabulary_size_must_be_known(folder: Path, tmp_path: Path):
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        prepare_target(config(name=str(folder)), tmp_path / "target")
    with pytest.raises(UserError, match=r"model\.context_length"):
        prepare_target(config(name=str(folder), vocab_size=151936), tmp_path / "target")
    model = prepare_target(config(name=str(folder), vocab_size=151936, context_length=99), tmp_path / "target")
    assert (model.vocab_size, model.context_length) == (151936, 99)


def test_sizes_of_multimodal_models_are_found(folder: Path, tmp_path: Path):
    text = {"vocab_size": 151936, "max_position_embeddings": 77}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    assert prepare_target(config(name=str(folder)), tmp_path / "target").context_length == 77


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="151645.*32000 embedding rows"):
        prepare_target(config(name=str(folder), vocab_size=32000), tmp_path / "target")


def test_a_base_model_without_template_is_refused(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"no chat template.*model\.chat_template"):
        prepare_target(config(name=str(folder)), tmp_path / "target")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    model = prepare_target(config(name=str(folder), chat_template=str(tmp_path / "own.jinja")), tmp_path / "target")
    assert model.render_text([Message("user", "hi")]) == "hi<|im_end|>"


def test_a_template_that_renders_nothing_is_refused(folder: Path, tmp_path: Path):
    """Templates of vision models that only know content in parts."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content.text }}{% endfor %}")
    with pytest.raises(UserError, match="renders a plain conversation as nothing"):
        prepare_target(config(name=str(folder)), tmp_path / "target")


def test_channels_count_only_where_the_template_knows_them(tmp_path: Path):
    build(FAMILIES["gpt-oss"], tmp_path / "model")
    source = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|return|>{% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(source)
    assert prepare_target(config(name=str(tmp_path / "model")), tmp_path / "target").harmony is None
    assert target("gpt-oss").harmony is not None


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.json"])
def test_templates_in_older_places(folder: Path, tmp_path: Path, place: str):
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder / place, chat_template=source)
    assert prepare_target(config(name=str(folder)), tmp_path / "target").template == source


def test_of_several_named_templates_the_default_one_is_taken(folder: Path, tmp_path: Path):
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert prepare_target(config(name=str(folder)), tmp_path / "target").template == source


def test_special_tokens_given_as_objects(folder: Path, tmp_path: Path):
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "special": True}, bos_token=None)
    assert 151645 in prepare_target(config(name=str(folder)), tmp_path / "target").eos_ids


def test_tokenizer_settings_that_would_cut_or_pad_are_off(folder: Path, tmp_path: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = prepare_target(config(name=str(folder)), tmp_path / "target")
    assert 5 < len(model.encode("one two three four five six seven eight")) < 50
    assert model.encode_batch(["a", "one two three"])[0] == model.encode("a")


def test_the_tokenizer_may_come_from_elsewhere(folder: Path, tmp_path: Path):
    weights = tmp_path / "weights"
    weights.mkdir()
    edit(weights / "config.json", vocab_size=152064, max_position_embeddings=500, eos_token_id=151644)
    model = prepare_target(config(name=str(weights), tokenizer=str(folder)), tmp_path / "target")
    assert (model.vocab_size, model.context_length) == (152064, 500)
    assert 151644 in model.eos_ids
    with_embedded = config(name=EMBEDDED, tokenizer=str(folder), vocab_size=151936)
    assert prepare_target(with_embedded, tmp_path / "other").context_length == 8192


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("a/b/c", "no such folder"),
        ("nowhere.gguf", "no such file"),
    ],
)
def test_models_that_are_not_there(name: str, message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        prepare_target(config(name=name), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_hub_model_that_is_not_in_the_cache_while_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"model `owner/name`: .*Hugging Face Hub"):
        prepare_target(config(name="owner/name"), tmp_path / "target")


def test_a_hub_model_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The layout of the hub's cache, offline: the commit is found out and kept."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "cache/models--owner--name"
    build(FAMILIES["qwen3"], cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = prepare_target(config(name="owner/name"), tmp_path / "target")
    assert (model.name, model.revision, model.vocab_size) == ("owner/name", commit, 151936)


def test_a_changed_folder_is_not_trusted(folder: Path, tmp_path: Path):
    prepare_target(config(name=str(folder)), tmp_path / "target")
    load_target.cache_clear()
    (tmp_path / "target/chat_template.jinja").write_text("other")
    with pytest.raises(UserError, match=r"chat_template\.jinja: missing or changed"):
        load_target(tmp_path / "target")
    with pytest.raises(UserError, match="no such file"):
        load_target(tmp_path / "elsewhere")


def test_preparing_again_replaces_what_was_there(folder: Path, tmp_path: Path):
    prepare_target(config(name=str(folder)), tmp_path / "target")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    prepare_target(config(name=str(folder)), tmp_path / "target")
    assert load_target(tmp_path / "target").render_text([Message("user", "hi")]) == "hi<|im_end|>"


CODE = '''
from transformers import PreTrainedTokenizer


class LetterTokenizer(PreTrainedTokenizer):
    """One id per letter, in Python."""

    vocab_files_names = {"vocab_file": "letters.txt"}

    def __init__(self, vocab_file, **kwargs):
        self.letters = open(vocab_file).read().split("\\n")
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: number for number, letter in enumerate(self.letters)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token) if token in self.letters else 0

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, directory, filename_prefix=None):
        raise NotImplementedError
'''


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A model whose tokenizer is Python code of its own, as Kimi's is."""
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "tokenization_letters.py").write_text(CODE)
    (folder / "letters.txt").write_text("\n".join("?abcdefghijklmnopqrstuvwxyz "))
    added = {"30": {"content": "<|im_end|>", "special": True}, "31": {"content": "</think>", "special": False}}
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="LetterTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_letters.LetterTokenizer", None]},
        eos_token="<|im_end|>",
        added_tokens_decoder=added,
    )
    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    edit(folder / "config.json", vocab_size=32, max_position_embeddings=64)
    return folder


def test_remote_code_does_not_run_unasked(remote: Path, tmp_path: Path):
    marker = tmp_path / "ran"
    code = remote / "tokenization_letters.py"
    code.write_text(f"open({str(marker)!r}, 'w')\n" + code.read_text())
    with pytest.raises(UserError, match=r"tokenization_letters\.py.*trust_remote_code"):
        prepare_target(config(name=str(remote)), tmp_path / "target")
    assert not marker.exists()


def test_remote_code_works_when_trusted(remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    prepare_target(config(name=str(remote), trust_remote_code=True), tmp_path / "target")
    shutil.rmtree(remote)
    load_target.cache_clear()
    model = load_target(tmp_path / "target")
    assert model.render([Message("user", "cab")]) == [3, 1, 2, 30, 1]
    assert model.encode_batch(["ab", "c"]) == [[1, 2], [3]]
    assert model.decode([3, 1, 2, 30]) == "cab<|im_end|>"
    assert model.structural_in("x<|im_end|>") == [30]
    assert model.eos_ids == {30}
    with (tmp_path / "target/remote/letters.txt").open("a") as file:
        file.write("\nz")
    load_target.cache_clear()
    with pytest.raises(UserError, match="changed since"):
        load_target(tmp_path / "target")


def test_a_package_that_remote_code_needs_is_named(remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = remote / "tokenization_letters.py"
    code.write_text("import a_package_nobody_has\n" + code.read_text())
    with pytest.raises(UserError, match="a_package_nobody_has"):
        prepare_target(config(name=str(remote), trust_remote_code=True), tmp_path / "target")
