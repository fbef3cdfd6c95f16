"""Hosted APIs that speak OpenAI's chat completions: OpenRouter and its like. Text only, no ids.

OpenRouter's routing (`provider`) is sent as configured, and what answered is checked against it: a
router may answer from another model or provider than the one asked for (OpenRouter ai-sdk-provider
issue 153). `usage.cost` is US dollars. Reasoning comes under three names.
"""

import contextlib
import re
from typing import Any

import orjson

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError
from scripts.lib.engines.base import Adapter, Answer, Call, EngineFacts, Failure, Reply, Request, post, seed_field
from scripts.lib.engines.completions_api import read_choice, texts_of, wire_messages
from scripts.lib.engines.values import as_count, as_object, as_objects, as_text, of_another

# Fields of a request that follow from other settings, or would change the shape of the reply.
_OURS = frozenset(
    [
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "tools",
        "provider",
        "stream",
        "n",
    ]
)
_LARGEST_COST = 1e6  # US dollars that no answer costs


class OpenAI(Adapter):
    """An OpenAI-compatible API; endpoints are base URLs that end before `/chat/completions`."""

    kind = "openai"
    exact = False
    hosted = True
    names_its_model = True
    returns_hidden_states = False
    only_gguf = False
    compiles = False
    environment = None
    metrics = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.routing = config.engine.routing

    def check(self) -> None:
        super().check()
        if ours := sorted(_OURS & self.config.engine.extra_body.keys()):
            raise UserError(
                f"engine.extra_body: {', '.join(ours)}: set by this project: use the keys of engine, sampling and lanes"
            )

    def request(self, request: Request) -> Call:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.served_model,
            "messages": wire_messages(request.messages),
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **seed_field("seed", request),
        }
        # Only what is set: APIs refuse parameters that they don't know.
        optional = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        body.update({name: value for name, value in optional.items() if value})
        if sampling.repetition_penalty != 1.0:
            body["repetition_penalty"] = sampling.repetition_penalty
        if request.tools:
            body["tools"] = orjson.Fragment(request.tools)  # as it is: its numbers may have any size
        if self.routing is not None:
            body["provider"] = self.routing.model_dump(exclude_none=True)
        body.update(self.config.engine.extra_body)
        # Most APIs ignore it; what stands behind vLLM or some gateways comes back under this name.
        return post("/chat/completions", body, {"X-Request-Id": request.id})

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        read = read_choice(reply, now)
        if isinstance(read, Failure):
            return read
        body, choice, message = read
        for echoed in (body.get("id"), reply.headers.get("x-request-id")):
            if failure := of_another(request, echoed):
                return failure
        model, provider = as_text(body.get("model")) or "", as_text(body.get("provider")) or ""
        problem = self._not_as_asked(model, provider)
        if problem:
            return Failure("fatal", problem)
        texts = texts_of(message)
        if isinstance(texts, Failure):
            return texts
        usage = as_object(body.get("usage"))
        details = as_object(usage.get("completion_tokens_details"))
        cost, elsewhere = read_cost(usage)
        answer = Answer(
            choice["finish_reason"],
            text=texts[0],
            reasoning=texts[1],
            reasoning_tokens=as_count(details.get("reasoning_tokens", usage.get("reasoning_tokens"))),
            prompt_tokens=as_count(usage.get("prompt_tokens")),
            output_tokens=as_count(usage.get("completion_tokens")),
            model=model,
            provider=provider,
            reply_id=as_text(body.get("id")) or "",
            cost_usd=cost,
            billed_elsewhere=elsewhere,
        )
        if answer.finish_reason == "stop" and not answer.text and answer.reasoning:
            answer.flags.append("answer_in_reasoning")
        return answer

    def _not_as_asked(self, model: str, provider: str) -> str | None:
        """Why an answer is not from the model and provider that were asked for."""
        if model and not _same_model(model, self.served_model):
            return f"asked for the model `{self.served_model}`, `{model}` answered: pin another one or correct the name"
        routing = self.routing
        if routing is None or not provider:
            return None
        allowed = routing.only or (routing.order if routing.allow_fallbacks is False else None)
        if allowed and not any(_same_provider(provider, name) for name in allowed):
            return f"asked for the providers {', '.join(allowed)}, `{provider}` answered: the routing is not obeyed"
        if any(_is_provider(provider, name) for name in routing.ignore or ()):
            return f"provider `{provider}` answered though engine.routing.ignore names it"
        return None

    @property
    def listed_model(self) -> str:
        return self.served_model.partition(":")[0]  # variants such as `:floor` are not listed

    def probe(self) -> list[Call]:
        return [Call("GET", "/models")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        listed = as_objects(as_object(replies[0].json() if replies[0] else None).get("data"))
        mine = next((model for model in listed if model.get("id") == self.served_model), {})
        return EngineFacts(
            engine="openai",
            models=tuple(str(model.get("id", "")) for model in listed),
            context_length=as_count(mine.get("context_length")) or None,
        )


def _same_model(answered: str, asked: str) -> bool:
    """Whether names mean one model: routers append a date (`owner/name-0711`) and drop a variant (`:free`)."""
    answered, asked = (name.lower().partition(":")[0] for name in (answered, asked))
    if answered == asked or answered.rpartition("/")[2] == asked.rpartition("/")[2]:
        return True
    return re.fullmatch(re.escape(asked) + r"-[\d-]{4,}", answered) is not None


def _plain(provider: str) -> str:
    """A provider's name without its endpoint's variant, as people and slugs both write it."""
    return re.sub(r"[^a-z0-9]", "", provider.lower().partition("/")[0])


def _same_provider(answered: str, asked: str) -> bool:
    """Whether an answer may be from the provider that was asked for.

    Answers name providers for people (`Moonshot AI`, `Google`, `Mancer 2`), routing by slug (`moonshotai`,
    `google-vertex`, `mancer`) with the endpoint's variant (`deepinfra/fp8`), which answers don't tell.
    """
    names = _plain(answered), _plain(asked)
    return names[0].startswith(names[1]) or names[1].startswith(names[0])


def _is_provider(answered: str, ignored: str) -> bool:
    """Whether an answer is surely from an ignored provider. Of `fireworks/nvfp4` other endpoints may answer."""
    variant = ignored.partition("/")[2]
    return _plain(answered) == _plain(ignored) and variant.lower() in ("", answered.partition("/")[2].lower())


def read_cost(usage: dict[str, Any]) -> tuple[float | None, bool]:
    """(US dollars of an answer, whether somebody bills more than these). None: the API doesn't tell.

    With a key of one's own (`is_byok`) OpenRouter's `cost` is its fee, mostly 0, and the provider's bill stands in
    `cost_details.upstream_inference_cost`, where it is told; else that is a part of `cost` (forgecode issue 1641,
    automatos-ai PR 745).
    """
    fee = _dollars(usage.get("cost"))
    upstream = _dollars(as_object(usage.get("cost_details")).get("upstream_inference_cost"))
    if usage.get("is_byok") is not True:
        told = [cost for cost in (fee, upstream) if cost is not None]
        return max(told, default=None), False
    return (None if fee is None and upstream is None else (fee or 0.0) + (upstream or 0.0)), upstream is None


def _dollars(value: Any) -> float | None:
    """A sum of money; some gateways write it as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < _LARGEST_COST else None
