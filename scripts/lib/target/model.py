"""The target model as its tokens see it: tokenizer, chat template and facts, pinned in one folder.

`prepare.prepare_target` builds the folder (results/target), every later stage loads it from there, offline:
`target.json` (facts and hashes) and the tokenizer's files (see `vocabulary`). For example:

    target = load_target("results/target")
    ids = target.render([Message("user", "Hi")])     # what an engine is sent
    target.decode(ids)                               # '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.exact_json import parse_json
from scripts.lib.core.records import Message
from scripts.lib.target.byte_level import token_bytes
from scripts.lib.target.chat_template import frozen_template, template_message, template_variables, with_arguments
from scripts.lib.target.vocabulary import Vocabulary, open_vocabulary

FACTS_FILE = "target.json"
# Templates run arbitrary expressions over the messages: whatever they raise is the template's refusal.
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, SyntaxError, RecursionError,
    MemoryError,
)  # fmt: skip
_WINDOW = 48  # characters on each side of a seam


class TemplateError(ValueError):
    """The chat template refuses a conversation, or its text can't be tokenized."""


@dataclass(frozen=True)
class Facts:
    """The content of target.json."""

    name: str
    revision: str | None
    vocab_size: int
    context_length: int
    eos_ids: list[int]
    bos_id: int | None
    structural: dict[str, dict[str, int]]
    tool_ids: list[int]
    think_ids: list[int] | None
    template_kwargs: dict[str, Any]
    date: str
    tokenizer_hash: str
    template_hash: str
    tokenizer: str | None  # where tokenizer and template come from when not from `name`
    remote_code: bool  # the tokenizer is Python code of the model's
    files: dict[str, str]  # path inside the folder -> sha256
    think_texts: list[str] | None = None  # tags around a thought that are ordinary text to the tokenizer


class Target:
    """Tokenizer + template + facts of the target model.

    Attributes:
        vocab_size: rows of the embedding; ids lie in [0, vocab_size). Not the tokenizer's length, which is smaller
            (Qwen3: 151,669 of 151,936) and, where ids have gaps, says nothing at all.
        context_length: longest prompt + answer in tokens.
        eos_ids: ids that end a turn.
        bos_id: id that every prompt starts with and holds once; None when the template renders no such token
            (SmolLM2's nominal bos is `<|im_start|>`, which opens every turn).
        structural_ids: chat, think, tool, media and eos ids that user text must not contain.
        tool_ids: ids that open tool calls.
        think_open_id, think_close_id: ids of the tags around a thought.
        think_texts: the tags of a model that writes them as ordinary text (Skywork, EXAONE Deep); None for all others.
    """

    def __init__(self, facts: Facts, vocabulary: Vocabulary):
        self.facts = facts
        self.name = facts.name
        self.revision = facts.revision
        self.vocab_size = facts.vocab_size
        self.context_length = facts.context_length
        self.eos_ids = frozenset(facts.eos_ids)
        self.bos_id = facts.bos_id
        self.tool_ids = frozenset(facts.tool_ids)
        self.think_open_id: int | None
        self.think_close_id: int | None
        self.think_open_id, self.think_close_id = facts.think_ids or (None, None)
        self.think_texts = tuple(facts.think_texts) if facts.think_texts else None
        self.tokenizer_hash = facts.tokenizer_hash
        self.template_hash = facts.template_hash
        self.structural_texts = {text: token for tokens in facts.structural.values() for text, token in tokens.items()}
        self.structural_ids = frozenset(self.structural_texts.values()) | self.eos_ids
        self.template: str = vocabulary.template
        frozen = frozen_template(self.template, facts.date)
        self._apply = vocabulary.renderer(frozen, template_variables(frozen, facts.template_kwargs, facts.date))
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._bytes = token_bytes(vocabulary.backend) if vocabulary.backend is not None else None
        # A structural id needs its token's text: looking for that first spares tokenizing almost every text.
        self._suspicious = re.compile("|".join(re.escape(text) for text in self.structural_texts) or r"(?!)")

        added = vocabulary.added.values()
        self._walls = tuple(
            token.content for token in added if token.content in self.structural_texts and not token.rstrip
        )
        self._encode_header = functools.lru_cache(maxsize=256)(self.encode)
        self._greedy = tuple(token.content for token in added if token.lstrip)

    def provenance(self) -> dict[str, Any]:
        """What the ids of this target depend on, for the metadata of shards."""
        facts = self.facts
        return {
            "name": facts.name,
            "revision": facts.revision,
            "tokenizer_hash": facts.tokenizer_hash,
            "template_hash": facts.template_hash,
            "template_kwargs": facts.template_kwargs,
            "date": facts.date,
            "vocab_size": facts.vocab_size,
        }

    def render(
        self, messages: Sequence[Message], tools: str | None = None, template_kwargs: str | None = None
    ) -> list[int]:
        """Prompt ids of a conversation, generation prompt included.

        `tools` and `template_kwargs` are JSON texts; the latter are template variables over the pinned ones.
        Raises TemplateError when the template refuses the messages.
        """
        return self.encode(self.render_text(messages, tools, template_kwargs))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: str | None = None,
        template_kwargs: str | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The text whose tokens `render` returns. Raises TemplateError when the template refuses the messages."""
        if not messages:
            raise TemplateError("the conversation has no messages")
        conversation = [template_message(message) for message in messages]
        calls = any("tool_calls" in message for message in conversation)
        try:
            parsed_tools = parse_json(tools) if tools else None
            variables = parse_json(template_kwargs) if template_kwargs else {}

            def apply(messages: list[dict]) -> str:
                return self._apply(messages, parsed_tools, generation_prompt, **variables)

            return self._apply_with_calls(conversation, apply) if calls else apply(conversation)
        except _REFUSALS as error:
            raise TemplateError(" ".join(str(error).split())[:300] or type(error).__name__) from None

    @staticmethod
    def _apply_with_calls(conversation: list[dict], apply: Callable[[list[dict]], str]) -> str:
        """Templates disagree whether a call's arguments are an object (most) or JSON text (DeepSeek-V3.1): try both."""
        try:
            return apply(with_arguments(conversation, as_text=False))
        except (jinja2.TemplateError, TypeError):
            return apply(with_arguments(conversation, as_text=True))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, control tokens in it recognised, no special tokens added.

        Raises TemplateError for text that isn't Unicode (lone surrogates).
        """
        try:
            return self._vocabulary.encode(text)
        except (TypeError, UnicodeEncodeError):
            raise TemplateError(f"text can't be tokenized: {text[:60]!r} is not valid Unicode") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode`, for many texts at once: all cores, without the interpreter in between."""
        if self._backend is None:
            return [self.encode(text) for text in texts]
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):
            return [self.encode(text) for text in texts]  # raises at the text that is at fault

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens kept, nothing cleaned up. Broken characters come out as U+FFFD."""
        if self._bytes is not None:
            return self._bytes.text(ids)
        return self._vocabulary.decode(list(ids))

    def structural_in(self, text: str) -> list[int]:
        """Structural ids that this text alone would produce when it is tokenized, in order."""
        if not self._suspicious.search(text) and (
            text.isascii() or not self._suspicious.search(self._normalized(text))
        ):
            return []
        return [token for token in self.encode(text) if token in self.structural_ids]

    def _normalized(self, text: str) -> str:
        normalizer = self._backend.normalizer if self._backend is not None else None
        return normalizer.normalize_str(text) if normalizer is not None else text

    def separable(self, left: str, right: str) -> bool:
        """Whether `left` and `right` give the same ids apart as together.

        Not so where a pre-tokenizer or a merge reaches over the seam: `assistant\\n` + `\\nHi`. Beyond a control token
        nothing reaches; elsewhere a window of text on both sides is tried.
        """
        if left.endswith(self._walls) and not right.startswith(self._greedy):
            return True
        left, right = left[-_WINDOW:], right[:_WINDOW]
        start = max((left.rfind(wall) for wall in self._walls), default=-1)
        if start > 0:
            left = left[start:]  # mostly the header of a turn, the same every time
        return self.encode(left + right) == self._encode_header(left) + self.encode(right)

    @property
    def think_tags(self) -> tuple[str, str] | None:
        """The texts of the tags around a thought, tokens or not."""
        if self.think_open_id is None or self.think_close_id is None:
            return self.think_texts  # type: ignore[return-value]
        return self.decode([self.think_open_id]), self.decode([self.think_close_id])

    @property
    def thinks(self) -> bool:
        """Whether an answer may hold a thought, set apart by tags or channels."""
        return self.think_tags is not None or self.harmony is not None

    @functools.cached_property
    def harmony(self) -> dict[str, int] | None:
        """Ids of gpt-oss's channel markers by name; None for every other family."""
        names = ("start", "channel", "message", "end", "return", "call")
        ids = {name: self.structural_texts.get(f"<|{name}|>") for name in names}
        if None in ids.values() or "<|channel|>" not in self.template:
            return None
        return ids  # type: ignore[return-value]


@functools.lru_cache(maxsize=4)
def load_target(directory: Path | str) -> Target:
    """Load the target that `prepare_target` wrote to `directory`.

    Raises UserError when the folder is missing, incomplete, or was changed since.
    """
    directory = Path(directory)
    values = durable.read_json(directory / FACTS_FILE)
    try:
        facts = Facts(**values)
    except TypeError as error:
        raise UserError(f"{directory / FACTS_FILE}: written by another version ({error}): run prepare_target") from None
    for name, digest in facts.files.items():
        path = directory / name
        if not path.is_file() or durable.sha256_file(path) != digest:
            raise UserError(f"{path}: missing or changed since prepare_target wrote it: run prepare_target again")
    return open_target(directory, facts)


def open_target(directory: Path, facts: Facts) -> Target:
    """The target of a folder whose facts are at hand."""
    return Target(facts, open_vocabulary(directory, facts.remote_code))
