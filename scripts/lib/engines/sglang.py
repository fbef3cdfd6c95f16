"""SGLang: `/generate` with our prompt ids (native), or chat completions that return ids.

Read in 0.5.23 and tried there on the CPU: `/generate` takes `input_ids` and a request id `rid`, and
answers `output_ids` with the stop token, `meta_info.finish_reason` as {"type", "matched"}. `top_k` -1
turns it off. `sampling_seed` has an effect only with deterministic inference switched on. Chat takes
`input_ids` in place of the rendered messages; `return_token_ids` gives `response_token_ids`.
"""

from scripts.lib.config.model import Engine
from scripts.lib.engines.base import Answer, Call, EngineFacts, Failure, Reply, Request, post
from scripts.lib.engines.chat_api import read_choice, reasoning_of, stop_id, wire_messages
from scripts.lib.engines.errors import error_in_200, read_error
from scripts.lib.engines.values import (
    as_count,
    as_object,
    as_objects,
    as_text,
    check_ids,
    of_another,
    read_ids,
    read_object,
    shown,
)


class SGLang:
    """Adapter of an SGLang server, or natively of sglang-router in front of several.

    The router (0.3.2) passes on only the chat fields that it knows: not `input_ids`, `rid`, `return_token_ids`.
    """

    exact = True

    def __init__(self, engine: Engine, served_model: str) -> None:
        self.chat, self.served_model = engine.api == "chat", served_model

    def request(self, request: Request) -> Call:
        return self._chat_request(request) if self.chat else self._native_request(request)

    def _native_request(self, request: Request) -> Call:
        sampling = request.sampling
        return post(
            "/generate",
            {
                "input_ids": request.prompt_ids,
                "rid": request.id,
                "sampling_params": {
                    "max_new_tokens": request.max_tokens,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k or -1,
                    "min_p": sampling.min_p,
                    "repetition_penalty": sampling.repetition_penalty,
                    "presence_penalty": sampling.presence_penalty,
                    "frequency_penalty": sampling.frequency_penalty,
                    "stop_token_ids": list(request.stop_ids),
                    "sampling_seed": request.seed,
                },
            },
        )

    def _chat_request(self, request: Request) -> Call:
        sampling = request.sampling
        return post(
            "/v1/chat/completions",
            {
                "model": self.served_model,
                "messages": wire_messages(request.messages),
                "input_ids": request.prompt_ids,
                "rid": request.id,
                "max_tokens": request.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "stop_token_ids": list(request.stop_ids),
                "seed": request.seed,
                "return_token_ids": True,
                "return_prompt_token_ids": True,
            },
        )

    def read(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        return self._read_chat(request, reply, now) if self.chat else self._read_native(request, reply, now)

    def _read_native(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        if reply.status != 200:
            return read_error(reply.status, reply.headers, reply.body, now)
        body = read_object(reply)
        if isinstance(body, Failure):
            return body
        if failure := error_in_200(body, reply, now):
            return failure
        meta = as_object(body.get("meta_info"))
        if failure := of_another(request, meta.get("id")):
            return failure
        reason = meta.get("finish_reason")
        reason = reason if isinstance(reason, dict) else {"type": reason}
        if reason.get("type") == "abort":
            status = as_count(reason.get("status_code"))
            if status in (400, 503):
                return read_error(status, reply.headers, shown(reason.get("message")).encode(), now)
            return Failure(
                "retry", f"aborted by the engine: {shown(reason.get('message') or 'no reason given')}", billed=True
            )
        if reason.get("type") not in ("stop", "length"):
            return Failure("retry", f"no finish reason but {shown(reason.get('type'))}", billed=True)
        ids = read_ids(body.get("output_ids"), "is it SGLang's /generate?")
        if isinstance(ids, Failure):
            return ids
        answer = Answer(
            reason["type"],
            output_ids=ids,
            matched_stop=as_count(reason.get("matched")),
            prompt_tokens=as_count(meta.get("prompt_tokens")),
            output_tokens=as_count(meta.get("completion_tokens")),
            model=self.served_model,
        )
        return check_ids(request, answer, body.get("prompt_token_ids"))

    def _read_chat(self, request: Request, reply: Reply, now: float) -> Answer | Failure:
        read = read_choice(reply, now)
        if isinstance(read, Failure):
            return read
        body, choice, message = read
        if failure := of_another(request, body.get("id")):
            return failure
        ids = read_ids(
            choice.get("response_token_ids"),
            "set engine.api to native (SGLang without `return_token_ids` is too old for chat, and sglang-router takes "
            "that field away)",
        )
        if isinstance(ids, Failure):
            return ids
        usage = as_object(body.get("usage"))
        answer = Answer(
            choice["finish_reason"],
            output_ids=ids,
            matched_stop=stop_id(choice),
            text=as_text(message.get("content")),
            reasoning=reasoning_of(message),
            prompt_tokens=as_count(usage.get("prompt_tokens")),
            output_tokens=as_count(usage.get("completion_tokens")),
            model=as_text(body.get("model")) or "",
        )
        return check_ids(request, answer, choice.get("prompt_token_ids"))

    def abort(self, request_id: str) -> Call | None:
        return post("/abort_request", {"rid": request_id})

    def probe(self) -> list[Call]:
        return [Call("GET", "/v1/models"), Call("GET", "/server_info")]

    def read_probe(self, replies: list[Reply | None]) -> EngineFacts:
        models, server = (as_object(reply.json() if reply else None) for reply in replies)
        listed = as_objects(models.get("data"))
        return EngineFacts(
            engine="sglang",
            version=as_text(server.get("version")),
            models=tuple(str(model.get("id", "")) for model in listed),
            context_length=(as_count(listed[0].get("max_model_len")) or None) if listed else None,
            weights=as_text(server.get("model_path")),
        )
