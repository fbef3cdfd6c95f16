"""A prompt's way to its outcome: what to ask next, and what an answer or a failure means for it.

Pure rules, no IO: the stage sends what `next_request` returns and hands back what came.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scripts.lib.client.attempts import GivenUp
from scripts.lib.client.backlog import Work
from scripts.lib.client.unasked_thought import unasked_thought
from scripts.lib.completions.outcomes import Verdict, judge
from scripts.lib.completions.payment import billed_tokens
from scripts.lib.config.model import Config
from scripts.lib.core.records import OUTCOMES, Completion, Message, Turn
from scripts.lib.engines.base import Answer, Failure, Request
from scripts.lib.engines.request_ids import RequestIds
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.target.output import Output, add_text, split_output
from scripts.lib.target.reconstruction import reconstruct, reconstruction_flags
from scripts.lib.target.turn_format import knows_thoughts

# Answers that are worth another seed (empty, filtered) are asked this many times more.
RESAMPLES = 2
_SPARE = 64  # tokens that are left free once a request that fills the context was refused for its length


@dataclass(slots=True)
class Step:
    """What follows from an answer or a failure.

    - `done`: journal `completion`
    - `turn`: journal `turn` and go on with the next user message
    - `part`: journal `turn`, a truncated answer, and ask for the rest
    - `again`: ask again after `delay` seconds
    """

    kind: Literal["done", "turn", "part", "again"]
    completion: Completion | None = None
    turn: Turn | None = None
    delay: float = 0.0
    refused: bool = False  # by the endpoint, at once
    endpoint: str = ""  # whose answer or refusal this follows from; none, where it was given up after several failures


class Dialogue:
    """The rules of one dataset's conversations with one target."""

    def __init__(
        self,
        target: Target,
        name: str,
        config: Config,
        max_tokens: int,
    ) -> None:
        self.target, self.name, self.dataset, self.sampling = target, name, config.datasets[name], config.sampling
        self.engine, self.served_model = config.engine.kind, config.served_name
        self.max_tokens = max_tokens
        self.context_length = target.context_length  # lowered when an endpoint serves less
        self._stop_ids = tuple(sorted(target.eos_ids))
        self._request_ids = RequestIds()

    # --- asking ---

    def _render(self, work: Work) -> list[int]:
        """Ids of the next prompt. The first one has come with them from stage 1. Raises TemplateError."""
        if not work.turns and work.prompt.prompt_ids is not None:
            return work.prompt.prompt_ids
        prompt = work.prompt
        return self.target.render(history(prompt.messages, work.turns), prompt.tools, prompt.template_kwargs)

    def next_request(self, work: Work) -> Request | Step:
        """The request for the next turn; a `done` step when there can't be one."""
        if work.prompt_ids is None:
            try:
                work.prompt_ids = self._render(work)
            except TemplateError as error:
                return self._end(work, "template_error", str(error))
        prompt_ids, wanted = self._wanted(work, work.prompt_ids)
        room = self.context_length - work.spare - len(prompt_ids)
        if room < 1:
            reason = f"{len(prompt_ids)} prompt tokens, the context holds {self.context_length - work.spare}"
            return self._give_up(work, "prompt_too_long", reason)
        return Request(
            id=self._request_ids.make(work.prompt.id, len(work.turns)),
            prompt_ids=prompt_ids,
            max_tokens=min(wanted, room),
            seed=self._seed(work),
            sampling=self.sampling,
            messages=history(work.prompt.messages, work.turns),
            tools=work.prompt.tools,
            stop_ids=self._stop_ids,
        )

    def _seed(self, work: Work) -> int | None:
        if self.sampling.seed is None:
            return None
        return seed_of(self.sampling.seed, work.prompt.id, len(work.turns), work.resamples + (work.part is not None))

    def _wanted(self, work: Work, prompt_ids: list[int]) -> tuple[list[int], int]:
        """(ids to send, most tokens to ask for), whatever room there is."""
        if work.part is None:
            return prompt_ids, self.max_tokens
        wanted = self.dataset.truncation_max_tokens or self.max_tokens
        if self.dataset.truncation == "continue":
            return prompt_ids + work.part.output_ids, wanted - len(work.part.output_ids)
        return prompt_ids, wanted

    # --- answers ---

    def answered(self, work: Work, request: Request, answer: Answer, endpoint: str, seconds: float) -> Step | Failure:
        """Judge an answer. A Failure says that it isn't one (ids of another vocabulary, no stop token)."""
        assert work.prompt_ids is not None
        continuing = work.part is not None and self.dataset.truncation == "continue"
        before = work.part.output_ids if continuing and work.part else []
        read = self._read_ids(work.prompt_ids, request, answer, before)
        if isinstance(read, Failure):
            return read
        ids, output, appended = read
        exact = answer.output_ids is not None
        verdict = judge(answer, ids, output, work.prompt.tools is not None, self.target.eos_ids)
        work.attempts.answered()
        if verdict.again and work.resamples < RESAMPLES:
            work.resamples += 1
            work.attempts.repeats += 1
            return Step("again")
        turn = Turn(
            prompt_ids=work.prompt_ids,
            output_ids=ids,
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            # Text that stands in the ids is made when the next turn or the finished shard needs it.
            content=None if exact else output.content,
            reasoning=None if exact else output.reasoning,
            ids_origin="engine" if exact else "reconstructed",
            eos_appended=appended,
            flags=verdict.flags,
            model=answer.model,
            provider=answer.provider,
            endpoint=endpoint,
            cost_usd=(answer.cost_usd or 0.0) + (work.part.cost_usd if work.part else 0.0),
            billed_tokens=sum(billed_tokens(request, answer)) + (work.part.billed_tokens if work.part else 0),
            seconds=int(1000 * (seconds + (work.part.seconds if work.part else 0.0))) / 1000,
            seed=request.seed or 0,
            engine=self.engine,
            served_model=self.served_model,
        )
        if verdict.outcome in ("length", "reasoning_only", "repetition") and self._wants_more(work, turn, verdict):
            work.part = turn
            return Step("part", turn=turn)
        return self._conclude(work, turn, verdict)

    def _read_ids(
        self, prompt_ids: list[int], request: Request, answer: Answer, before: list[int]
    ) -> tuple[list[int], Output, bool] | Failure:
        """(all ids of the turn, what they say, whether the stop token had to be added)."""
        target = self.target
        if answer.output_ids is None:
            return self._read_text(request, answer)
        new = answer.output_ids
        largest = max(max(new, default=0), answer.matched_stop or 0)
        if largest >= target.vocab_size:
            return Failure(
                "fatal", f"id {largest} is outside the target's vocabulary of {target.vocab_size}: another model?"
            )
        appended = False
        if answer.finish_reason == "length" and len(new) < request.max_tokens:
            # Old SGLang answered one token when the request was too long (PR 2956).
            answer.flags.append("stopped_early")
        if answer.finish_reason != "length" and not (new and new[-1] in target.eos_ids):
            if answer.matched_stop is not None:
                # Another id than those that end a turn of the target may be there already.
                if new[-1:] != [answer.matched_stop]:
                    new, appended = [*new, answer.matched_stop], True
            elif answer.finish_reason == "stop":
                return Failure("retry", "stopped without a stop token: the last tokens were lost", most_attempts=2)
        ids = before + new if before else new
        return ids, split_output(target, prompt_ids, ids), appended

    def _read_text(self, request: Request, answer: Answer) -> tuple[list[int], Output, bool] | Failure:
        """Ids rebuilt from the text of an API that returns none."""
        if problem := unasked_thought(self.target, request.prompt_ids, answer):
            return Failure("permanent", problem, billed=True)
        content, reasoning = answer.text or "", answer.reasoning
        if (reasoning or answer.reasoning_tokens) and not knows_thoughts(self.target):
            answer.flags.append("reasoning_dropped")  # told with its share in the report
        if not content and not reasoning:
            return [], Output("", None, True, ()), False
        try:
            ids = reconstruct(self.target, request.prompt_ids, content, reasoning, answer.finish_reason)
        except ValueError as error:
            return Failure("permanent", f"the answer's text can't become ids: {error}")
        answer.flags += reconstruction_flags(ids, content, reasoning, answer.output_tokens)
        closed = not (answer.finish_reason == "length" and reasoning and not content)
        tools = tuple(token for token in ids if token in self.target.tool_ids)
        return ids, Output(content, reasoning, closed, tools), False

    def _wants_more(self, work: Work, turn: Turn, verdict: Verdict) -> bool:
        """Whether a truncated answer is to be asked for again, or for its rest."""
        if turn.finish_reason != "length" or self.dataset.truncation not in ("retry", "continue"):
            return False
        if verdict.outcome == "repetition":
            return False  # more room only makes the loop longer
        cap = min(self.dataset.truncation_max_tokens or 0, self.context_length - len(turn.prompt_ids))
        return work.part is None and cap > len(turn.output_ids)

    def _conclude(self, work: Work, turn: Turn, verdict: Verdict) -> Step:
        if OUTCOMES[verdict.outcome].answered:
            work.turns.append(turn)
        more = sum(message.role == "user" for message in work.prompt.messages) > len(work.turns)
        if verdict.outcome == "ok" and more:
            work.part = work.prompt_ids = None
            work.resamples = 0
            add_text(self.target, turn)
            return Step("turn", turn=turn)
        return self._end(work, verdict.outcome, verdict.reason)

    # --- failures ---

    def tried(self, work: Work, next_try: float | GivenUp) -> Step:
        """What follows from a failure: seconds until the next try, or the prompt's end."""
        if not isinstance(next_try, GivenUp):
            return Step("again", delay=next_try)
        if next_try.outcome == "prompt_too_long" and not work.spare and self._fills_the_context(work):
            # Engines that speculate keep some tokens for their drafts (sglang, managers/utils.py).
            work.spare = _SPARE
            work.attempts.repeats += 1
            return Step("again")
        return self._give_up(work, next_try.outcome, next_try.reason)

    def _fills_the_context(self, work: Work) -> bool:
        prompt_ids, wanted = self._wanted(work, work.prompt_ids or [])
        return len(prompt_ids) + wanted > self.context_length - _SPARE

    def _give_up(self, work: Work, outcome: str, reason: str) -> Step:
        """No more can be had: a truncated answer that is there already, and paid, is the answer."""
        if work.part is None:
            return self._end(work, outcome, reason)
        closed = split_output(self.target, work.part.prompt_ids, work.part.output_ids).reasoning_closed
        kept = Verdict("length" if closed else "reasoning_only", f"the answer reached max_tokens, then: {reason}")
        return self._conclude(work, work.part, kept)

    def _end(self, work: Work, outcome: str, reason: str | None) -> Step:
        return Step(
            "done",
            completion=Completion(
                work.prompt.id,
                self.name,
                outcome,
                reason,
                attempts=work.attempts.repeats + 1,
                turns=work.turns,
            ),
        )


def history(messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message]:
    """The conversation up to the next user message to answer, earlier answers included."""
    answers = iter(turns)
    past: list[Message] = []
    for message in messages:
        past.append(message)
        if message.role == "user":
            turn = next(answers, None)
            if turn is None:
                break
            past.append(Message("assistant", turn.text, turn.reasoning))
    return past


def seed_of(seed: int, prompt_id: str, turn: int, again: int) -> int:
    """The seed of one request: other prompts, turns and repetitions draw other numbers. 31 bits, for all engines."""
    text = f"{seed}/{prompt_id}/{turn}/{again}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF
