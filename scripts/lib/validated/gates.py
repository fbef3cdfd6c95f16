"""The checks that every sample must pass, each with a name, in the order in which they are tried.

A sample is refused by the first check that it fails, so the counts of all checks add up to the rejects.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scripts.lib.completions.outcomes import repeating_tail
from scripts.lib.config.model import Validation
from scripts.lib.core.records import Message, Sample
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.validated.writing_systems import letters_by_script

# Ready tokens come with their own conventions (a supervised line break after the stop token, no template known), so
# only what makes tokens unusable is checked on them.
GIVEN = "given"
RENDERED = ("rendered",)


# In the order in which they are tried. Each is a method of Gates, whose first line stands in the docs.
GATES = (
    "template_error",
    "lengths",
    "id_range",
    "duplicate_id",
    "max_length",
    "no_supervised_tokens",
    "all_supervised",
    "min_supervised_tokens",
    "adjacent_supervised_tokens",
    "bos",
    "control_token_in_text",
    "turn_markers",
    "think_close",
    "stop_token",
    "max_tokens",
    "tool_markers",
    "truncated",
    "empty_answer",
    "repetition",
    "replacement_character",
    "script",
    "duplicate_answers",
)


@dataclass(slots=True)
class Seen:
    """A sample as the checks look at it. `spans` are the supervised stretches, as (start, stop)."""

    sample: Sample
    ids: np.ndarray
    mask: np.ndarray
    spans: list[tuple[int, int]]


def look(sample: Sample) -> Seen:
    """The sample with its supervised spans; ids and mask may still be anything."""
    ids = np.asarray(sample.input_ids, dtype=np.int64)
    mask = np.asarray(sample.loss_mask, dtype=np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask == 1, [0]))))
    return Seen(sample, ids, mask, [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])])


class Gates:
    """The checks for one target and one set of thresholds. Keeps the state that checks across samples need.

    `max_answer`: most ids of an answer that an engine was asked for, where that is known.
    """

    def __init__(self, target: Target, settings: Validation, max_answer: int | None = None):
        self.target = target
        self.settings = settings
        self.max_answer = max_answer
        self.max_length = settings.max_length or target.context_length
        self._answers: dict[int, int] = {}
        self._ids: set[str] = set()
        self.checks: dict[str, Callable[[Seen], str | None]] = {name: getattr(self, f"_{name}") for name in GATES}
        # Structural ids of a conversation's prompt depend on its shape alone.
        self._expected_markers = lru_cache(maxsize=4096)(self._markers_of_shape)

    def refuse(self, sample: Sample) -> tuple[str, str] | None:
        """(check, what it saw) of the first check that the sample fails; None when it passes all."""
        seen = look(sample)
        for name, check in self.checks.items():
            detail = check(seen)
            if detail is not None:
                return name, detail
        return None

    # Tokens

    def _template_error(self, seen: Seen) -> str | None:
        """The chat template refuses the conversation, or has no place for a part of it."""
        if "template_error" not in seen.sample.flags:
            return None
        try:
            self.target.render(seen.sample.messages, seen.sample.tools, seen.sample.template_kwargs)
        except TemplateError as error:
            return str(error)
        return "the chat template has no place for a part of the conversation"

    def _lengths(self, seen: Seen) -> str | None:
        """No ids, another number of mask values than ids, or a mask of more than 0 and 1."""
        ids, mask = len(seen.sample.input_ids), len(seen.sample.loss_mask)
        if ids == 0 or ids != mask:
            return f"{ids} ids, {mask} mask values"
        odd = set(np.unique(seen.mask).tolist()) - {0, 1}
        return f"mask holds {sorted(odd)}" if odd else None

    def _id_range(self, seen: Seen) -> str | None:
        """An id outside the model's embedding."""
        # Against the rows of the embedding. The tokenizer's length is another number, smaller or full of gaps.
        outside = np.flatnonzero((seen.ids < 0) | (seen.ids >= self.target.vocab_size))
        if not outside.size:
            return None
        return f"id {seen.ids[outside[0]]} at {outside[0]}, the model has {self.target.vocab_size} ids"

    def _duplicate_id(self, seen: Seen) -> str | None:
        """A sample id that came before in the shard."""
        if seen.sample.id in self._ids:
            return "this id came before"
        self._ids.add(seen.sample.id)
        return None

    def _max_length(self, seen: Seen) -> str | None:
        """More tokens than `validation.max_length` (the target's context when not set)."""
        return f"{len(seen.ids)} tokens of at most {self.max_length}" if len(seen.ids) > self.max_length else None

    def _no_supervised_tokens(self, seen: Seen) -> str | None:
        """Nothing to learn: the mask is all zeros, as where every answer is marked as not to be learnt."""
        return None if seen.spans else "the mask is all zeros"

    def _all_supervised(self, seen: Seen) -> str | None:
        """A mask of ones only: prompt and answer aren't told apart."""
        return "the mask is all ones: prompt and answer aren't told apart" if seen.mask.all() else None

    def _min_supervised_tokens(self, seen: Seen) -> str | None:
        """Fewer supervised tokens than `validation.min_supervised_tokens`."""
        count, needed = int(seen.mask.sum()), self.settings.min_supervised_tokens
        return f"{count} supervised tokens of at least {needed}" if count < needed else None

    def _adjacent_supervised_tokens(self, seen: Seen) -> str | None:
        """No two supervised tokens side by side (`validation.adjacent_supervised_tokens`; DFlash needs them)."""
        if not self.settings.adjacent_supervised_tokens or any(stop - start > 1 for start, stop in seen.spans):
            return None
        return "no two supervised tokens stand side by side"

    def _bos(self, seen: Seen) -> str | None:
        """A beginning-of-sequence token that is missing, doubled or elsewhere."""
        bos = self.target.bos_id
        if bos is None:
            return None
        count = int((seen.ids == bos).sum())
        if seen.sample.ids_origin == GIVEN:
            return f"{count} BOS tokens" if count > 1 else None
        return None if count == 1 and seen.ids[0] == bos else f"{count} BOS tokens, the first id is {seen.ids[0]}"

    # Structure

    def _control_token_in_text(self, seen: Seen) -> str | None:
        """A message whose text alone makes a control token."""
        for message in seen.sample.messages:
            if message.role == "assistant" and seen.sample.ids_origin not in RENDERED:
                continue  # its ids are checked by think_close, stop_token, tool_markers
            for text in (message.content, message.reasoning or ""):
                found = self.target.structural_in(text)
                if found:
                    return f"{message.role} text holds {self.target.decode(found[:1])!r}"
        return None

    def _turn_markers(self, seen: Seen) -> str | None:
        """Other control tokens in the prompt than a harmless conversation of the same shape has.

        Finds every control token that text smuggled into the prompt, a lost or doubled turn, and a mask that starts
        at the wrong turn, without knowing anything about the template.
        """
        sample = seen.sample
        if sample.ids_origin == GIVEN or not sample.messages or sample.messages[-1].role != "assistant":
            return None
        # Templates leave out blank messages and compare messages (`message == user_messages[-1]`), so blank ones stay
        # blank and equal ones equal.
        history = sample.messages[:-1]
        first: dict[str, int] = {}
        shape = tuple(
            (
                m.role,
                f"x{first.setdefault(m.content, number)}" if m.content.strip() else m.content,
                m.reasoning and "x",
                m.tool_calls,
                m.name,
                m.tool_call_id,
            )
            for number, m in enumerate(history)
        )
        try:
            expected = self._expected_markers(shape, sample.tools, sample.template_kwargs)
        except TemplateError as error:
            return f"the chat template refuses a conversation of this shape: {error}"
        found = tuple(token for token in seen.ids[: seen.spans[-1][0]].tolist() if token in self.target.structural_ids)
        if found == expected:
            return None
        at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
        odd = self.target.decode([found[at]]) if at < len(found) else "nothing"
        return f"{len(found)} structural tokens in the prompt, expected {len(expected)}; number {at} is {odd!r}"

    def _markers_of_shape(
        self, shape: tuple[tuple, ...], tools: str | None, template_kwargs: str | None
    ) -> tuple[int, ...]:
        ids = self.target.render([Message(*part) for part in shape], tools, template_kwargs)
        return tuple(token for token in ids if token in self.target.structural_ids)

    def _outputs(self, seen: Seen) -> Iterator[list[int]]:
        for start, stop in seen.spans:
            yield seen.ids[start:stop].tolist()

    def _think_close(self, seen: Seen) -> str | None:
        """More than one closing think tag in an answer."""
        close = self.target.think_close_id
        if close is None or seen.sample.ids_origin == GIVEN:
            return None
        most = max(output.count(close) for output in self._outputs(seen))
        return f"{most} closing think tags in one answer" if most > 1 else None

    def _stop_token(self, seen: Seen) -> str | None:
        """A stop token in mid-answer, or none at the end of an answer that isn't marked as truncated."""
        if seen.sample.ids_origin == GIVEN:
            return None
        for number, output in enumerate(self._outputs(seen)):
            inside = [token for token in output[:-1] if token in self.target.eos_ids]
            if inside:
                return f"{self.target.decode(inside[:1])!r} inside an answer"
            last = number == len(seen.spans) - 1
            if output[-1] not in self.target.eos_ids and not (last and "truncated" in seen.sample.flags):
                return "an answer that isn't marked as truncated has no stop token"
        return None

    def _max_tokens(self, seen: Seen) -> str | None:
        """An answer longer than the `max_tokens` that was asked for: the engine did not heed it."""
        if self.max_answer is None or seen.sample.ids_origin != "engine":
            return None
        longest = max(stop - start for start, stop in seen.spans)
        allowed = self.max_answer + ("eos_appended" in seen.sample.flags)
        return f"an answer of {longest} ids, {self.max_answer} were asked for" if longest > allowed else None

    def _tool_markers(self, seen: Seen) -> str | None:
        """A tool call though no tools were given."""
        sample = seen.sample
        if sample.tools or sample.ids_origin == GIVEN or any(message.tool_calls for message in sample.messages):
            return None
        for output in self._outputs(seen):
            for token in output:
                if token in self.target.tool_ids:
                    return f"{self.target.decode([token])!r} though no tools were given"
        return None

    # Quality

    def _truncated(self, seen: Seen) -> str | None:
        """An answer that was cut at max_tokens (`validation.truncated: drop`)."""
        drop = self.settings.truncated == "drop" and "truncated" in seen.sample.flags
        return "the answer was cut at max_tokens" if drop else None

    def _empty_answer(self, seen: Seen) -> str | None:
        """An answer of nothing but blanks."""
        for message in seen.sample.messages:
            spoken = message.content.strip() or (message.reasoning or "").strip() or message.tool_calls
            if message.role == "assistant" and not spoken:
                return "an answer holds nothing but blanks"
        return None

    def _repetition(self, seen: Seen) -> str | None:
        """An answer that ends in a loop (`validation.max_period`, `max_repeats`)."""
        for output in self._outputs(seen):
            while output and output[-1] in self.target.eos_ids:
                output.pop()
            found = repeating_tail(output, self.settings.max_period, self.settings.max_repeats)
            if found:
                return f"an answer ends with {found[1]} repeats of {found[0]} ids"
        return None

    def _replacement_character(self, seen: Seen) -> str | None:
        """An answer with U+FFFD (`validation.replacement_character`)."""
        if self.settings.replacement_character == "keep":
            return None
        for text in answers(seen.sample):
            if "truncated" in seen.sample.flags:
                text = text.rstrip("\ufffd")  # max_tokens may fall inside a character
            at = text.find("\ufffd")
            if at >= 0:
                return f"an answer holds U+FFFD at character {at}"
        return None

    def _script(self, seen: Seen) -> str | None:
        """Letters of a writing system that is neither in the prompt nor in `validation.scripts`."""
        if self.settings.scripts is None:
            return None
        asked = " ".join(message.content for message in seen.sample.messages if message.role != "assistant")
        allowed = set(self.settings.scripts) | letters_by_script(asked).keys()
        for text in answers(seen.sample):
            letters = letters_by_script(text)
            strange = {script: count for script, count in letters.items() if script not in allowed}
            if strange:
                script = max(strange, key=lambda name: strange[name])
                return f"{strange[script]} of {sum(letters.values())} letters are {script}, which the prompt isn't"
        return None

    def _duplicate_answers(self, seen: Seen) -> str | None:
        """An answer that came `validation.duplicate_answers` times before in the shard."""
        limit = self.settings.duplicate_answers
        if limit is None:
            return None
        start, stop = seen.spans[-1]
        key = hash(seen.ids[start:stop].tobytes())
        self._answers[key] = self._answers.get(key, 0) + 1
        return f"the same answer came {limit} times before" if self._answers[key] > limit else None


def answers(sample: Sample) -> Iterator[str]:
    """The texts of all assistant turns, thoughts included."""
    for message in sample.messages:
        if message.role == "assistant":
            yield message.content
            if message.reasoning:
                yield message.reasoning
