"""Is an endpoint what it says, and does it still answer sensibly?

The probe asks what serves there, before any prompt is spent. The canary is a question with a known
answer at temperature 0: broken kernels answer with one token repeated, nothing, or noise (sglang
issue 18874, vllm issues 13035 and 41651), with HTTP 200 and a healthy /health.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.client.belonging import Belonging
from scripts.lib.client.transport import HttpTransport
from scripts.lib.client.unasked_thought import unasked_thought
from scripts.lib.config.model import Config, Sampling
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.core.paths import State
from scripts.lib.core.provenance import digest
from scripts.lib.core.records import Message
from scripts.lib.engines.base import Adapter, Answer, EngineFacts, Failure, Reply, Request
from scripts.lib.engines.request_ids import RequestIds
from scripts.lib.target.model import Target
from scripts.lib.target.output import split_output

_QUESTION, _ANSWER = "What is 2+2? Answer with one number.", re.compile(r"\b(4|four)\b", re.IGNORECASE)
_MAX_TOKENS, _MAX_WITH_THOUGHT = 48, 512
_LONG_ENOUGH = 12  # ids from which on few different ones are suspicious
_KNOWS = 2  # times as many right answers as wrong ones of an endpoint, until a wrong one is the engine's fault


@dataclass(frozen=True)
class CanaryRefused:
    """The canary was refused (HTTP 400). That tells of other refusals, and nothing of answers."""

    reason: str


@dataclass
class _AnswersSoFar:
    """How an endpoint has answered the question."""

    right: int = 0
    wrong: int = 0
    blamed: bool = False  # the last answer was taken for that of a broken engine

    @property
    def knows_it(self) -> bool:
        """Whether a wrong answer can only come from a broken engine. A weak model may not know it, or now and then."""
        return self.right > _KNOWS * self.wrong


class Canary:
    """Probes and canaries of one job. Knows of each endpoint whether its model is able to give the known answer."""

    def __init__(
        self,
        config: Config,
        target: Target,
        adapter: Adapter,
        transport: HttpTransport,
        state: Path,
        belonging: Belonging | None = None,
    ) -> None:
        """`state` is the run's folder: what one job has seen an endpoint answer, later ones know as well."""
        self.config, self.target, self.adapter, self.transport = config, target, adapter, transport
        self.belonging = belonging
        thinks = not adapter.exact or target.think_close_id is not None or target.harmony is not None
        self._max_tokens = _MAX_WITH_THOUGHT if thinks else _MAX_TOKENS
        self._answered: set[str] = set()  # endpoints
        self.messages = [Message("user", _QUESTION)]
        self.prompt_ids = target.render(self.messages)
        self._state = state
        self._so_far: dict[str, _AnswersSoFar] = {}
        # In the form of all our ids, so that a reply to it that goes astray is known.
        self._name, self._request_ids = secrets.token_hex(16), RequestIds()

    async def probe(self, url: str) -> EngineFacts | Failure:
        """What serves at `url`. Raises UserError when it can't be what the configuration asks for."""
        replies: list[Reply | None] = []
        failure: Failure | None = None
        for call in self.adapter.probe():
            reply = await self.transport.call_within(30.0, url, call)
            if isinstance(reply, Failure):
                if reply.kind == "fatal":
                    raise UserError(reply.reason)
                failure = reply
                replies.append(None)
            else:
                replies.append(reply)
        if failure is not None and not any(replies):
            return failure
        facts = self.adapter.read_probe(replies)
        problem = mismatch(facts, self.adapter, self.target)
        if problem:
            raise UserError(f"{url}: {problem}")
        return facts

    async def ask(self, url: str) -> str | CanaryRefused | Failure | None:
        """None when all is well, the reason when the answer is degenerate, a Failure when there is none."""
        request = Request(
            id=self._request_ids.make(self._name, 0),
            prompt_ids=self.prompt_ids,
            max_tokens=self._max_tokens,
            seed=0,
            sampling=Sampling(temperature=0.0, top_p=1.0),
            messages=self.messages,
        )
        # As long as any request may take: an endpoint that swallows its canary is soon tested again.
        settings = self.config.transport
        seconds = settings.base_seconds + self._max_tokens / settings.min_tokens_per_second
        reply = await self.transport.call_within(seconds, url, self.adapter.request(request))
        if isinstance(reply, Failure) and reply.kind == "free":  # of the connection, not of the endpoint
            reply = await self.transport.call_within(seconds, url, self.adapter.request(request))
        if isinstance(reply, Failure):
            return reply
        answer = self.adapter.read(request, reply, time.time())
        if isinstance(answer, Failure):
            if answer.kind != "permanent":
                return answer
            # A question that nobody would refuse: whatever was refused before may have been as good. What was
            # generated is an answer, if none that can be taken.
            return answer.reason if answer.billed else CanaryRefused(answer.reason)
        # Told before anything is spent. Later on it is one provider's: its answers are refused one by one.
        if url not in self._answered and (problem := unasked_thought(self.target, self.prompt_ids, answer)):
            raise UserError(f"{url}: {problem}")
        self._answered.add(url)
        if self.belonging is not None:
            self.belonging.expect(url, request, answer)
        return self.judge(url, answer)

    def judge(self, url: str, answer: Answer) -> str | None:
        """Why the canary's answer is degenerate; None when it is well.

        A text API is a router over many servers with models of their own: a wrong sum says nothing of its answers.
        """
        if answer.output_ids is None:
            return self._degenerate_text(answer)
        problem = degenerate(answer.output_ids, self.target.eos_ids)
        if max(answer.output_ids, default=0) >= self.target.vocab_size:
            problem = f"id {max(answer.output_ids)} is outside the vocabulary of {self.target.vocab_size}"
        if problem:
            return problem
        output = split_output(self.target, self.prompt_ids, answer.output_ids)
        # What a model says while it thinks is no answer, and one that was cut in its thought has given none.
        return self._judge_content(url, output.content) if output.reasoning_closed else None

    def _degenerate_text(self, answer: Answer) -> str | None:
        text = answer.text or answer.reasoning or ""
        return degenerate(self.target.encode(text), self.target.eos_ids) if text.strip() else "an empty answer"

    def _judge_content(self, url: str, text: str) -> str | None:
        known = self._known(url)
        so_far = self._so_far.setdefault(url, _AnswersSoFar(right=int(known.exists())))
        if _ANSWER.search(text) is not None:
            so_far.right += 1
            so_far.wrong += so_far.blamed  # nothing was broken: a model that knows it now and then
            so_far.blamed = False
            with contextlib.suppress(OSError):  # a full disk: others will find out themselves
                if not so_far.knows_it:
                    known.unlink(missing_ok=True)
                elif not known.exists():
                    durable.write_bytes(known, f"{url} knows: {_QUESTION}\n".encode())
            return None
        if so_far.knows_it:
            so_far.blamed = True
            return (
                f"`{_QUESTION}` was answered well before, now with {' '.join(text.split())[:80]!r} "
                f"(when another model serves there now, delete {known})"
            )
        so_far.wrong += 1
        return None

    def _known(self, url: str) -> Path:
        """The file that is there when an endpoint has given the known answer to this run."""
        model = self.config.served_name
        return State(self._state).canaries / digest([url, model, self.target.tokenizer_hash, self.target.template_hash])


def degenerate(ids: Sequence[int], eos_ids: frozenset[int]) -> str | None:
    """Why ids look like those of a broken engine; None when they don't."""
    spoken = [token for token in ids if token not in eos_ids]
    if not spoken:
        return "an empty answer"
    if len(spoken) >= _LONG_ENOUGH and len(set(spoken)) <= 2:
        return f"{len(spoken)} tokens, only {len(set(spoken))} different: {spoken[:4]}..."
    return None


def mismatch(facts: EngineFacts, adapter: Adapter, target: Target) -> str | None:
    """Why an endpoint isn't what the configuration asks for, and what to do; None when it is."""
    if facts.vocab_size is not None and facts.vocab_size != target.vocab_size:
        return (
            f"serves a model with {facts.vocab_size} token ids, the target {target.name} has {target.vocab_size}: "
            "point engine.endpoints at the target model, or correct model.name"
        )
    wanted = adapter.listed_model
    listed = {*facts.models, *(model.partition(":")[0] for model in facts.models)}
    if adapter.names_its_model and facts.models and wanted not in listed:
        some = ", ".join(facts.models[:5])
        return f"does not serve `{wanted}` but {some}: set engine.served_model to one of them"
    if facts.context_length is not None and facts.context_length <= 64:
        return f"a context of {facts.context_length} tokens leaves no room for answers: start it with a longer one"
    return None
