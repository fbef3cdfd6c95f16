"""llama.cpp's server (`xllamacpp` or any llama-server): prompt ids in, sampled ids out.

Tried on xllamacpp 2026.10.11549: `/completion` takes an id list as `prompt` and adds no BOS to it
(tokens_evaluated equals its length); with `return_tokens` it answers `tokens`, which include the
end-of-turn id when `stop_type` is `eos`. Defaults (top_k 40, top_p .95, min_p .05) apply unless set.
"""

from scripts.lib.engines.base import Answer, Call, EngineFacts, Failure, Reply, Request, post
from scripts.lib.engines.errors import error_in_200, read_error
from scripts.lib.engines.values import as_count, as_object, as_objects, as_text, check_ids, read_ids, read_object, shown

# Asked for by name, because the full reply repeats all settings and the prompt's text.
_SEED = "generation_settings/seed"
_FIELDS = ["tokens", "stop_type", "tokens_evaluated", "tokens_predicted", "model", _SEED]
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCpp:
    """Adapter of a llama.cpp server."""

    exact = True

    def request(self, request: Request) -> Call:
        sampling = request.sampling
        return post(
            "/completion",
            {
                "prompt": request.prompt_ids,
                "n_predict": request.max_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "seed": request.seed,
                "cache_prompt": True,
                "return_tokens": True,
                "response_fields": _FIELDS,
            },
        )

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        if reply.status != 200:
            return read_error(reply.status, reply.headers, reply.body, now)
        body = read_object(reply)
        if isinstance(body, Failure):
            return body
        if failure := error_in_200(body, reply, now):
            return failure
        # There is no request id; the seed, which each request of ours has its own of, tells replies apart as well.
        seed = as_count(body.get(_SEED))
        if seed not in (None, request.seed):
            return Failure("retry", f"the answer to another request came (seed {seed})", billed=True)
        tokens = read_ids(body.get("tokens"), "is it a llama.cpp that knows `return_tokens`?")
        if isinstance(tokens, Failure):
            return tokens
        finish = _FINISH.get(as_text(body.get("stop_type")) or "")
        if finish is None:
            return Failure("retry", f"no finish reason (stop_type {shown(body.get('stop_type'))})", billed=True)
        answer = Answer(
            finish,
            output_ids=tokens,
            prompt_tokens=as_count(body.get("tokens_evaluated")),
            output_tokens=as_count(body.get("tokens_predicted")),
            model=as_text(body.get("model")) or "",
        )
        return check_ids(request, answer)

    def abort(self, request_id: str) -> Call | None:
        return None  # the server stops a request whose client has gone

    def probe(self) -> list[Call]:
        return [Call("GET", "/v1/models"), Call("GET", "/props")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        models, props = (as_object(reply.json() if reply else None) for reply in replies)
        listed = as_objects(models.get("data"))
        meta = as_object(listed[0].get("meta")) if listed else {}
        defaults = as_object(props.get("default_generation_settings"))
        return EngineFacts(
            engine="llamacpp",
            version=as_text(props.get("build_info")),
            models=tuple(str(model.get("id", "")) for model in listed),
            vocab_size=as_count(meta.get("n_vocab")) or None,
            context_length=as_count(defaults.get("n_ctx")) or as_count(meta.get("n_ctx")) or None,
            weights=as_text(props.get("model_path")),
        )
