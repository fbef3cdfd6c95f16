"""The tokenizer of a target folder, of either kind: ids of text, text of ids, and what renders its chat template.

`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; a tokenizer that needs code of its model
(`trust_remote_code`) keeps its files in `remote/` instead of the first two. Everything is read as transformers reads
it, but transformers itself is imported only for such code: it costs every job a second of CPU.
"""

import os
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.target.chat_template import Renderer, compile_template

# transformers warns on import that there is no torch: the client needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
REMOTE_FOLDER = "remote"
# In the order in which transformers gives ids to those that the tokenizer lacks.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Vocabulary(Protocol):
    """A tokenizer and its chat template, of either kind below."""

    @property
    def template(self) -> str: ...

    @property
    def special_tokens(self) -> dict[str, str]:
        """By name: bos_token, eos_token, ..."""
        ...

    @property
    def added(self) -> dict[int, AddedToken]: ...

    @property
    def backend(self) -> Tokenizer | None:
        """None for a tokenizer in Python."""
        ...

    def id_of(self, name: str) -> int | None:
        """Id of a named special token."""
        ...

    def renderer(self, template: str, variables: dict[str, Any]) -> Renderer:
        """What renders `template` with this tokenizer's special tokens and `variables`."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class PlainVocabulary:
    """The tokenizer of a folder that holds tokenizer.json, config and template, taken verbatim.

    What `PreTrainedTokenizerFast` makes of the same files, which is what counts: some tokenizer classes of transformers
    5 rebuild the pre-tokenizer from their own rules instead of reading tokenizer.json.
    """

    def __init__(self, directory: Path):
        config = durable.read_json(directory / TOKENIZER_CONFIG_FILE)
        self.template = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
        self.backend: Tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
        self.special_tokens = {name: text for name, text in config.items() if name.endswith("_token")}
        if self.backend.padding:
            self.special_tokens.setdefault("pad_token", self.backend.padding["pad_token"])
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        named = (self.special_tokens[name] for name in NAMED_TOKENS if name in self.special_tokens)
        missing = dict.fromkeys(text for text in named if text not in known)
        self.backend.add_tokens([AddedToken(text, special=True) for text in missing])
        self.added = self.backend.get_added_tokens_decoder()

    def id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def renderer(self, template: str, variables: dict[str, Any]) -> Renderer:
        return compile_template(template, self.special_tokens | variables)

    def encode(self, text: str) -> list[int]:
        # Without the offsets that `encode` works out for every token: a quarter of its time.
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


class RemoteVocabulary:
    """The tokenizer of a folder with Python code of its own, which is run: only after the user said so.

    The code may render templates in its own way too (Kimi's writes tools as TypeScript).
    """

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer

        try:
            hf: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
        except ImportError as error:
            raise UserError(
                f"{directory}: the tokenizer's code needs a package that isn't installed: {error}"
            ) from None
        self._hf = hf
        self.template = hf.chat_template
        self.special_tokens = hf.special_tokens_map
        self.added = hf.added_tokens_decoder
        self.backend = plain_backend(hf)

    def id_of(self, name: str) -> int | None:
        return getattr(self._hf, f"{name}_id")

    def renderer(self, template: str, variables: dict[str, Any]) -> Renderer:
        self._hf.chat_template = template

        def render(messages: list[dict], tools: list[dict] | None, generation_prompt: bool, **more: Any) -> str:
            return self._hf.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **{**variables, **more}
            )

        return render

    def encode(self, text: str) -> list[int]:
        if self.backend is not None:
            return self.backend.encode(text, add_special_tokens=False).ids
        return list(self._hf.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        if self.backend is not None:
            return self.backend.decode(ids, skip_special_tokens=False)
        return self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def plain_backend(hf: Any) -> Tokenizer | None:
    """The `tokenizers` object of a transformers tokenizer, without cutting or padding; None when it has none."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def open_vocabulary(directory: Path, remote_code: bool) -> Vocabulary:
    """The tokenizer and template of a target folder."""
    return RemoteVocabulary(directory / REMOTE_FOLDER) if remote_code else PlainVocabulary(directory)
