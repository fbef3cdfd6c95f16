"""What a model's location holds, before it is pinned: tokenizer, chat template, sizes, ids that end a turn.

A folder is laid out like a hub model: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
special_tokens_map.json, chat_template.jinja. Older layouts (vocab.json and merges.txt, SentencePiece, a template inside
tokenizer_config.json) are read as well, and so is a GGUF file, which holds all of it in its header.
"""

from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.config.model import Model
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.target import gguf
from scripts.lib.target.location import ModelLocation
from scripts.lib.target.vocabulary import NAMED_TOKENS, plain_backend

_HUB_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass
class Ingredients:
    """What a model's location tells. `folder` holds the tokenizer files of a folder or hub model."""

    folder: Path | None = None
    tokenizer_json: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    eos_ids: set[int] = field(default_factory=set)
    vocab_size: int | None = None
    context_length: int | None = None
    revision: str | None = None
    remote_code: bool = False


def gather(model: Model) -> Ingredients:
    """The ingredients of the configured model: tokenizer and template may come from elsewhere than its sizes.

    Raises UserError when something isn't there, or when the tokenizer needs code of its own and `trust_remote_code` is
    off.
    """
    found = _find(model, model.tokenizer or model.name, model.revision if model.tokenizer is None else None)
    if model.tokenizer is not None:
        sizes = _find_sizes(model)
        found.vocab_size, found.context_length = sizes.vocab_size or found.vocab_size, sizes.context_length
        found.eos_ids |= sizes.eos_ids
        found.revision = sizes.revision
    found.template = _template(model, found)
    found.vocab_size = model.vocab_size or found.vocab_size
    found.context_length = model.context_length or found.context_length
    for name in ("vocab_size", "context_length"):
        if getattr(found, name) is None:
            raise UserError(f"{model.name}: no config.json tells the {name}: set `model.{name}`")
    return found


def _find(model: Model, name: str, revision: str | None) -> Ingredients:
    """Tokenizer, template and sizes at one location."""
    location = ModelLocation(name)
    if location.gguf:
        return _from_gguf(location.gguf)
    patterns = (*_HUB_FILES, "*.py", "*.model", "*.tiktoken", "vocab.json", "merges.txt")
    return _from_folder(*location.small_files(revision, patterns), model)


def _find_sizes(model: Model) -> Ingredients:
    """Sizes of `model.name` when the tokenizer comes from elsewhere: its weights decide how many ids there are."""
    location = ModelLocation(model.name)
    if location.gguf:
        vocab_size, context_length = gguf.read_sizes(location.gguf)
        return Ingredients(vocab_size=vocab_size, context_length=context_length)
    folder, commit = location.small_files(model.revision, ("config.json", "generation_config.json"))
    return _sizes(folder, Ingredients(revision=commit))


def _from_gguf(path: Path) -> Ingredients:
    facts = gguf.read_gguf(path)
    return Ingredients(
        tokenizer_json=facts.tokenizer.to_str(),
        special_tokens=facts.special_tokens,
        template=facts.template,
        eos_ids=set(facts.eos_ids),
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
    )


def _from_folder(folder: Path, revision: str | None, model: Model) -> Ingredients:
    """Read a folder laid out like a hub model: config.json, tokenizer.json, tokenizer_config.json, ..."""
    config = _optional_json(folder / "tokenizer_config.json")
    found = _sizes(folder, Ingredients(folder=folder, revision=revision))
    found.special_tokens = _special_tokens(config, _optional_json(folder / "special_tokens_map.json"))
    found.template = _folder_template(folder, config)
    if (folder / "tokenizer.json").is_file():
        found.tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return found
    if "AutoTokenizer" in (config.get("auto_map") or {}):
        if not model.trust_remote_code:
            raise UserError(
                f"{model.tokenizer or model.name}: its tokenizer is Python code that comes with the model "
                f"({', '.join(sorted(path.name for path in folder.glob('*.py'))) or 'tokenizer code'}): read it, "
                "then set `model.trust_remote_code: true`"
            )
        found.remote_code = True
        return found
    found.tokenizer_json = _converted(folder, model)
    return found


def _converted(folder: Path, model: Model) -> str:
    """tokenizer.json of a folder that has only older files (vocab.json + merges.txt, SentencePiece)."""
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{model.tokenizer or model.name}: no tokenizer.json, and no tokenizer can be made: {reason}"
        ) from None
    backend = plain_backend(hf)
    if backend is None:
        raise UserError(f"{model.tokenizer or model.name}: no tokenizer.json, and {type(hf).__name__} has no fast form")
    return backend.to_str()


def _sizes(folder: Path, found: Ingredients) -> Ingredients:
    """Embedding rows, context and eos ids from config.json and generation_config.json."""
    config = _optional_json(folder / "config.json")
    text = config.get("text_config") or {}
    found.vocab_size = text.get("vocab_size") or config.get("vocab_size")
    found.context_length = text.get("max_position_embeddings") or config.get("max_position_embeddings")
    for values in (config, text, _optional_json(folder / "generation_config.json")):
        ends = values.get("eos_token_id")
        found.eos_ids |= {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}
    return found


def _optional_json(path: Path) -> dict:
    return durable.read_json(path) if path.is_file() else {}


def _special_tokens(*configs: dict) -> dict[str, str]:
    """Texts of the named special tokens; a later file fills what an earlier one leaves open."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name in NAMED_TOKENS:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                tokens.setdefault(name, text)
    return tokens


def _folder_template(folder: Path, tokenizer_config: dict) -> str | None:
    """The chat template, from wherever this model keeps it. Of several named ones, the one called `default`."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or _optional_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    return template


def _template(model: Model, found: Ingredients) -> str:
    if model.chat_template is not None:
        try:
            return Path(model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"model.chat_template: {model.chat_template}: {error}") from None
    if not found.template:
        raise UserError(
            f"{model.tokenizer or model.name}: has no chat template (a base model?): name one in `model.chat_template`"
        )
    return found.template
