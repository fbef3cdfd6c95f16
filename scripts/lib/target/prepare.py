"""From what the configuration names (a Hugging Face id, a folder, a GGUF file) to the pinned target folder."""

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.config.model import Config, Model
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Message
from scripts.lib.target import control_tokens, gguf
from scripts.lib.target import model as targets
from scripts.lib.target.location import ModelLocation

_HUB_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass
class Found:
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


def prepare_target(config: Config, output: Path) -> targets.Target:
    """Build the target folder of `config.model` at `output` and return the target loaded from it.

    Raises UserError when tokenizer, template or sizes can't be found, or when the tokenizer needs code of its own
    and `trust_remote_code` is off.
    """
    model = config.model
    found = _find(model, model.tokenizer or model.name, model.revision if model.tokenizer is None else None)
    if model.tokenizer is not None:
        sizes = _find_sizes(model)
        found.vocab_size, found.context_length = sizes.vocab_size or found.vocab_size, sizes.context_length
        found.eos_ids |= sizes.eos_ids
        found.revision = sizes.revision
    template = _template(model, found)
    vocab_size = model.vocab_size or found.vocab_size
    context_length = model.context_length or found.context_length
    for name, value in (("vocab_size", vocab_size), ("context_length", context_length)):
        if value is None:
            raise UserError(f"{model.name}: no config.json tells the {name}: set `model.{name}`")
    with tempfile.TemporaryDirectory(dir=_made(output.parent), prefix=".target-") as temporary:
        folder = Path(temporary)
        files = _write_files(folder, found, template)
        vocabulary = targets.open_vocabulary(folder, found.remote_code)
        facts = _facts(model, found, vocabulary, template, vocab_size, context_length, files)
        facts = dataclasses.replace(facts, bos_id=_bos_of_prompts(targets.open_target(folder, facts)))
        _publish(folder, facts, output)
    targets.load_target.cache_clear()
    return targets.load_target(output)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _find(model: Model, name: str, revision: str | None) -> Found:
    """Tokenizer, template and sizes at one location."""
    location = ModelLocation(name)
    if location.gguf:
        return _from_gguf(location.gguf)
    patterns = (*_HUB_FILES, "*.py", "*.model", "*.tiktoken", "vocab.json", "merges.txt")
    return _from_folder(*location.small_files(revision, patterns), model)


def _find_sizes(model: Model) -> Found:
    """Sizes of `model.name` when the tokenizer comes from elsewhere: its weights decide how many ids there are."""
    location = ModelLocation(model.name)
    if location.gguf:
        vocab_size, context_length = gguf.read_sizes(location.gguf)
        return Found(vocab_size=vocab_size, context_length=context_length)
    folder, commit = location.small_files(model.revision, ("config.json", "generation_config.json"))
    return _sizes(folder, Found(revision=commit))


def _from_gguf(path: Path) -> Found:
    facts = gguf.read_gguf(path)
    return Found(
        tokenizer_json=facts.tokenizer.to_str(),
        special_tokens=facts.special_tokens,
        template=facts.template,
        eos_ids=set(facts.eos_ids),
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
    )


def _from_folder(folder: Path, revision: str | None, model: Model) -> Found:
    """Read a folder laid out like a hub model: config.json, tokenizer.json, tokenizer_config.json, ..."""
    config = _optional_json(folder / "tokenizer_config.json")
    found = _sizes(folder, Found(folder=folder, revision=revision))
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
    backend = targets.plain_backend(hf)
    if backend is None:
        raise UserError(f"{model.tokenizer or model.name}: no tokenizer.json, and {type(hf).__name__} has no fast form")
    return backend.to_str()


def _sizes(folder: Path, found: Found) -> Found:
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
        for name in _SPECIAL:
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


def _template(model: Model, found: Found) -> str:
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


def _write_files(folder: Path, found: Found, template: str) -> dict[str, str]:
    """Write the tokenizer's files and the template. Returns their names and hashes."""
    (folder / targets.TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
    if found.remote_code:
        assert found.folder is not None
        remote = _made(folder / targets.REMOTE_FOLDER)
        for path in sorted(found.folder.iterdir()):
            if path.is_file() and path.suffix in (".py", ".model", ".tiktoken", ".json", ".txt"):
                shutil.copyfile(path, remote / path.name)
        (remote / targets.TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
    else:
        assert found.tokenizer_json is not None
        (folder / targets.TOKENIZER_FILE).write_text(found.tokenizer_json, encoding="utf-8", newline="")
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        durable.write_json(folder / targets.TOKENIZER_CONFIG_FILE, named | found.special_tokens)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): durable.sha256_file(path) for path in paths}


def _facts(
    model: Model,
    found: Found,
    vocabulary: targets.Vocabulary,
    template: str,
    vocab_size: int,
    context_length: int,
    files: dict[str, str],
) -> targets.Facts:
    added = {token.content: number for number, token in vocabulary.added.items()}
    named = {name: vocabulary.id_of(name) for name in ("bos_token", "eos_token")}
    always = {vocabulary.special_tokens[name]: number for name, number in named.items() if number is not None}
    eos = found.eos_ids | control_tokens.turn_ends(added)
    if named["eos_token"] is not None:
        eos.add(named["eos_token"])
    texts = {number: text for text, number in added.items()}
    always |= {texts[number]: number for number in eos if number in texts}
    if max(eos, default=0) >= vocab_size:
        raise UserError(
            f"{model.name}: the tokenizer ends turns with id {max(eos)}, the model has only {vocab_size} embedding rows: "
            "they don't belong together (or `model.vocab_size` is wrong)"
        )
    if not eos:
        raise UserError(
            f"{model.tokenizer or model.name}: no token that ends a turn is known: name it `eos_token` in tokenizer_config.json"
        )
    think = control_tokens.think_pair(added, template)
    return targets.Facts(
        name=model.name,
        revision=found.revision or model.revision,
        vocab_size=vocab_size,
        context_length=context_length,
        eos_ids=sorted(eos),
        bos_id=named["bos_token"],
        structural=control_tokens.structural_tokens(added, template, always),
        tool_ids=control_tokens.tool_openers(added),
        think_ids=list(think) if think else None,
        template_kwargs=model.chat_template_kwargs,
        date=model.date,
        tokenizer_hash=digest({name: files[name] for name in files if name != targets.TEMPLATE_FILE}),
        template_hash=files[targets.TEMPLATE_FILE],
        tokenizer=model.tokenizer,
        remote_code=found.remote_code,
        files=files,
    )


def _bos_of_prompts(target: targets.Target) -> int | None:
    """The id that every prompt starts with and holds once; None when the template renders none.

    Trying it also tells, before anything is generated, that the template works with this tokenizer at all.
    """
    one = [Message("user", "Hello")]
    turn = [Message("assistant", "Hello."), *one]
    try:
        prompts = [target.render([*one, *turn * number]) for number in range(3)]
    except targets.TemplateError as error:
        raise UserError(f"{target.name}: its chat template fails on a plain conversation: {error}") from None
    if not all(prompts):
        raise UserError(
            f"{target.name}: its chat template renders a plain conversation as nothing: name another in `model.chat_template`"
        )
    bos = target.bos_id
    return bos if bos is not None and all(ids[0] == bos and ids.count(bos) == 1 for ids in prompts) else None


def _publish(folder: Path, facts: targets.Facts, output: Path) -> None:
    """Move the files into place; target.json, which makes them valid, comes last."""
    _made(output)
    (output / targets.FACTS_FILE).unlink(missing_ok=True)
    for name in facts.files:
        durable.write_bytes(output / name, (folder / name).read_bytes())
    durable.write_json(output / targets.FACTS_FILE, dataclasses.asdict(facts))
