"""From what the configuration names (a Hugging Face id, a folder, a GGUF file) to the pinned target folder."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from scripts.lib.config.model import Config, Model
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Message
from scripts.lib.target import control_tokens, markers
from scripts.lib.target.bounds import limited_memory
from scripts.lib.target.ingredients import Ingredients, gather
from scripts.lib.target.model import FACTS_FILE, Facts, Target, TemplateError, load_target, open_target
from scripts.lib.target.vocabulary import (
    REMOTE_FOLDER,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Vocabulary,
    open_vocabulary,
)


def prepare_target(config: Config, output: Path) -> Target:
    """Build the target folder of `config.model` at `output` and return the target loaded from it.

    Raises UserError when tokenizer, template or sizes can't be found, or when the tokenizer needs code of its own
    and `trust_remote_code` is off.
    """
    model = config.model
    found = gather(model)
    with tempfile.TemporaryDirectory(dir=_made(output.parent), prefix=".target-") as temporary:
        folder = Path(temporary)
        files = _write_files(folder, found)
        vocabulary = open_vocabulary(folder, found.remote_code)
        facts = _facts(model, found, vocabulary, files)
        facts = dataclasses.replace(facts, bos_id=_bos_of_prompts(open_target(folder, facts)))
        facts = _with_learned_markers(open_target(folder, facts), vocabulary)
        _publish(folder, facts, output)
    load_target.cache_clear()
    return load_target(output)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _write_files(folder: Path, found: Ingredients) -> dict[str, str]:
    """Write the tokenizer's files and the template. Returns their names and hashes."""
    template = found.template or ""
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
    if found.remote_code:
        assert found.folder is not None
        remote = _made(folder / REMOTE_FOLDER)
        for path in sorted(found.folder.iterdir()):
            if path.is_file() and path.suffix in (".py", ".model", ".tiktoken", ".json", ".txt"):
                shutil.copyfile(path, remote / path.name)
        (remote / TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
    else:
        assert found.tokenizer_json is not None
        (folder / TOKENIZER_FILE).write_text(found.tokenizer_json, encoding="utf-8", newline="")
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        durable.write_json(folder / TOKENIZER_CONFIG_FILE, named | found.special_tokens)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): durable.sha256_file(path) for path in paths}


def _facts(model: Model, found: Ingredients, vocabulary: Vocabulary, files: dict[str, str]) -> Facts:
    assert found.template is not None
    assert found.vocab_size is not None
    assert found.context_length is not None
    added = {token.content: number for number, token in vocabulary.added.items()}
    named = {name: vocabulary.id_of(name) for name in ("bos_token", "eos_token")}
    always = {vocabulary.special_tokens[name]: number for name, number in named.items() if number is not None}
    eos = found.eos_ids | control_tokens.turn_ends(added)
    if named["eos_token"] is not None:
        eos.add(named["eos_token"])
    texts = {number: text for text, number in added.items()}
    always |= {texts[number]: number for number in eos if number in texts}
    if max(eos, default=0) >= found.vocab_size:
        raise UserError(
            f"{model.name}: the tokenizer ends turns with id {max(eos)}, the model has only {found.vocab_size} embedding rows: "
            "they don't belong together (or `model.vocab_size` is wrong)"
        )
    if not eos:
        raise UserError(
            f"{model.tokenizer or model.name}: no token that ends a turn is known: name it `eos_token` in tokenizer_config.json"
        )
    think = control_tokens.think_pair(added, found.template)
    return Facts(
        name=model.name,
        revision=found.revision or model.revision,
        vocab_size=found.vocab_size,
        context_length=found.context_length,
        eos_ids=sorted(eos),
        bos_id=named["bos_token"],
        structural=control_tokens.structural_tokens(added, found.template, always),
        tool_ids=control_tokens.tool_openers(added),
        think_ids=list(think) if think else None,
        template_kwargs=model.chat_template_kwargs,
        date=model.date,
        tokenizer_hash=digest({name: files[name] for name in files if name != TEMPLATE_FILE}),
        template_hash=files[TEMPLATE_FILE],
        tokenizer=model.tokenizer,
        remote_code=found.remote_code,
        files=files,
    )


def _bos_of_prompts(target: Target) -> int | None:
    """The id that every prompt starts with and holds once; None when the template renders none.

    Trying it also tells, before anything is generated, that the template works with this tokenizer at all.
    """
    one = [Message("user", "Hello")]
    turn = [Message("assistant", "Hello."), *one]
    try:
        with limited_memory():  # around the template alone: the tokenizer's threads reserve more
            texts = [target.render_text([*one, *turn * number]) for number in range(3)]
        prompts = [target.encode(text) for text in texts]
    except TemplateError as error:
        raise UserError(f"{target.name}: its chat template fails on a plain conversation: {error}") from None
    if not all(prompts):
        raise UserError(
            f"{target.name}: its chat template renders a plain conversation as nothing: name another in `model.chat_template`"
        )
    bos = target.bos_id
    return bos if bos is not None and all(ids[0] == bos and ids.count(bos) == 1 for ids in prompts) else None


def _with_learned_markers(target: Target, vocabulary: Vocabulary) -> Facts:
    """The facts with what the template shows of thoughts and tool calls, over what lists of names know."""
    facts = target.facts
    added = {token.content: number for number, token in vocabulary.added.items()}
    tags = markers.thought_tags(target)
    if tags is not None:
        tokens = all(tag in added for tag in tags)
        structural = dict(facts.structural)
        if tokens:
            structural["think"] = {**structural.get("think", {}), **{tag: added[tag] for tag in tags}}
        facts = dataclasses.replace(
            facts,
            think_ids=[added[tag] for tag in tags] if tokens else None,
            think_texts=None if tokens else list(tags),
            structural=structural,
        )
        target = Target(facts, vocabulary)
    return dataclasses.replace(facts, tool_ids=sorted({*facts.tool_ids, *markers.tool_openers(target)}))


def _publish(folder: Path, facts: Facts, output: Path) -> None:
    """Move the files into place; target.json, which makes them valid, comes last."""
    _made(output)
    (output / FACTS_FILE).unlink(missing_ok=True)
    for name in facts.files:
        durable.write_bytes(output / name, (folder / name).read_bytes())
    durable.write_json(output / FACTS_FILE, dataclasses.asdict(facts))
