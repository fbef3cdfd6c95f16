"""Adapters: what is sent, and what real servers answered. Faulty replies are in test_faults.

`replies/` holds whole replies of real servers to the requests that are built here: llama.cpp
(xllamacpp 2026.10), SGLang 0.5.23 and vLLM 0.32.0, all serving SmolLM2-135M-Instruct.
"""

import gzip
import re
import zlib
from pathlib import Path

import orjson
import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Sampling
from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, Failure, Reply, Request
from scripts.lib.engines.errors import read_error, retry_after
from scripts.lib.engines.values import excerpt

REPLIES = Path(__file__).parent / "replies"
# "What is 2+2? Answer with one number." in SmolLM2's template, default system prompt included.
PROMPT_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
PROMPT_IDS += [2, 198, 1, 4093, 198, 1780, 314, 216, 34, 27, 34, 47, 19842, 351, 582, 1230, 30, 2, 198]
PROMPT_IDS += [1, 520, 9531, 198]
ANSWER_IDS = [504, 2988, 314, 216, 36, 30, 2]  # The answer is 4.<|im_end|>


def adapter(**engine):
    settings = {"served_model": "m", **engine}
    return adapter_for(parse_config({"engine": settings, "datasets": {"d": {"class": "B", "source": "x"}}}, "test"))


def request(**changes) -> Request:
    values = {
        "id": "p-0-1",
        "prompt_ids": PROMPT_IDS,
        "max_tokens": 32,
        "seed": 7,
        "sampling": Sampling(temperature=0.7, top_p=0.95),
        "messages": [Message("user", "What is 2+2? Answer with one number.")],
        "stop_ids": (0, 2),
    }
    return Request(**{**values, **changes})


def sent(one, **changes) -> tuple[str, dict]:
    call = one.request(request(**changes))
    assert call.method == "POST"
    assert call.headers["Content-Type"] == "application/json"
    return call.path, orjson.loads(call.body)


# --- what is sent ---


def test_llamacpp_gets_our_ids_and_every_sampling_parameter():
    """Its own defaults (top_k 40, min_p 0.05) apply to what is left out."""
    path, body = sent(adapter(kind="llamacpp"))
    assert path == "/completion"
    assert body.pop("response_fields")
    assert body == {
        "prompt": PROMPT_IDS,
        "n_predict": 32,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 7,
        "cache_prompt": True,
        "return_tokens": True,
    }


def test_sglang_native_gets_our_ids():
    path, body = sent(adapter(kind="sglang"))
    assert path == "/generate"
    assert (body["input_ids"], body["rid"]) == (PROMPT_IDS, "p-0-1")
    assert body["sampling_params"] == {
        "max_new_tokens": 32,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [0, 2],
        "sampling_seed": 7,
    }


def test_sglang_chat_gets_messages_and_our_ids_and_returns_both_kinds():
    path, body = sent(adapter(kind="sglang", api="chat"))
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    assert (body["input_ids"], body["model"]) == (PROMPT_IDS, "m")
    assert body["return_token_ids"]
    assert body["return_prompt_token_ids"]


def test_vllm_gets_our_ids_not_messages():
    path, body = sent(adapter(kind="vllm"), sampling=Sampling(top_k=20))
    assert path == "/v1/completions"
    assert (body["prompt"], body["model"], body["top_k"]) == (PROMPT_IDS, "m", 20)
    assert (body["request_id"], body["return_token_ids"]) == ("p-0-1", True)
    assert "messages" not in body


def test_a_hosted_api_gets_only_what_is_set():
    one = adapter(kind="openai", endpoints=["https://api.invalid/v1"])
    path, body = sent(one)
    assert path == "/chat/completions"
    assert set(body) == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    _, body = sent(one, sampling=Sampling(top_k=20, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5))
    assert (body["top_k"], body["min_p"], body["repetition_penalty"], body["presence_penalty"]) == (20, 0.1, 1.1, 0.5)


def test_routing_and_tools_are_sent_as_configured():
    routing = {"order": ["a", "b"], "ignore": ["c"], "quantizations": ["fp8"], "allow_fallbacks": False}
    _, body = sent(
        adapter(kind="openai", endpoints=["https://api.invalid/v1"], routing=routing), tools='[{"type": "function"}]'
    )
    assert body["provider"] == {**routing, "require_parameters": True}
    assert body["tools"] == [{"type": "function"}]


def test_reasoning_of_earlier_turns_is_sent_under_both_names():
    history = [Message("user", "a"), Message("assistant", "b", "c"), Message("user", "d")]
    _, body = sent(adapter(kind="openai", endpoints=["https://api.invalid/v1"]), messages=history)
    assert body["messages"][1] == {"role": "assistant", "content": "b", "reasoning_content": "c", "reasoning": "c"}


@pytest.mark.parametrize(("kind", "path"), [("sglang", "/abort_request"), ("vllm", None), ("llamacpp", None)])
def test_abort(kind, path):
    call = adapter(kind=kind).abort("p-0-1")
    assert (call and call.path) == path
    assert call is None or orjson.loads(call.body) == {"rid": "p-0-1"}


# --- what real servers answered ---


def reply(name: str) -> Reply:
    recorded = orjson.loads((REPLIES / f"{name}.json").read_bytes())
    return Reply(recorded["status"], recorded["headers"], orjson.dumps(recorded["body"]))


ENGINES = {
    "llamacpp": {"kind": "llamacpp"},
    "sglang": {"kind": "sglang"},
    "sglang_chat": {"kind": "sglang", "api": "chat"},
    "vllm": {"kind": "vllm"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_stopped_answer_ends_with_its_stop_token(name):
    answer = adapter(**ENGINES[name]).read(request(), reply(f"{name}_stop"), 0.0)
    assert isinstance(answer, Answer)
    assert answer.output_ids == ANSWER_IDS
    assert (answer.finish_reason, answer.prompt_tokens, answer.output_tokens) == ("stop", len(PROMPT_IDS), 7)
    assert answer.flags == []


@pytest.mark.parametrize("name", ENGINES)
def test_a_truncated_answer_says_so(name):
    answer = adapter(**ENGINES[name]).read(request(), reply(f"{name}_length"), 0.0)
    assert (answer.finish_reason, answer.output_ids) == ("length", ANSWER_IDS[:3])
    assert answer.matched_stop is None


@pytest.mark.parametrize("name", ENGINES)
def test_a_prompt_beyond_the_context_is_the_prompts_fault(name):
    failure = adapter(**ENGINES[name]).read(request(), reply(f"{name}_too_long"), 0.0)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.outcome) == ("permanent", "prompt_too_long")


@pytest.mark.parametrize(
    ("echoed", "ours"), [("a" * 32 + "-0000-000000000002", True), ("gateway-17", False), (None, False)]
)
def test_the_answer_to_another_request_is_no_answer(echoed, ours):
    recorded = reply("sglang_stop").json()
    recorded["meta_info"]["id"] = echoed
    read = adapter(kind="sglang").read(
        request(id="a" * 32 + "-0000-000000000001"), Reply(200, {}, orjson.dumps(recorded)), 0.0
    )
    assert isinstance(read, Failure if ours else Answer)


@pytest.mark.parametrize(("echoed", "ours"), [(7, True), (8, False), (None, True)])
def test_llamacpp_knows_replies_by_their_seed(echoed, ours):
    """Its prompts' counts may be equal: a prompt would get another one's answer, unseen."""
    recorded = reply("llamacpp_stop").json()
    recorded["generation_settings/seed"] = echoed
    read = adapter(kind="llamacpp").read(request(), Reply(200, {}, orjson.dumps(recorded)), 0.0)
    assert isinstance(read, Answer if ours else Failure)
    if not ours:
        assert read.kind == "retry"


@pytest.mark.parametrize("name", ENGINES)
def test_other_prompt_ids_than_ours_stop_the_run(name):
    failure = adapter(**ENGINES[name]).read(request(prompt_ids=[1, *PROMPT_IDS]), reply(f"{name}_stop"), 0.0)
    assert isinstance(failure, Failure)
    assert failure.kind == "fatal"


def test_llamacpp_tells_what_it_is():
    facts = adapter(kind="llamacpp").read_probe([reply("llamacpp_models"), reply("llamacpp_props")])
    assert (facts.engine, facts.vocab_size, facts.context_length) == ("llamacpp", 49152, 1024)
    assert facts.version
    assert facts.weights.endswith(".gguf")


def test_sglang_tells_what_it_is():
    facts = adapter(kind="sglang").read_probe([reply("sglang_models"), reply("sglang_server_info")])
    assert (facts.engine, facts.version, facts.context_length) == ("sglang", "0.5.23", 2048)
    assert facts.models


@pytest.mark.parametrize(
    ("told", "room", "says"),
    [
        # One token is kept by the pool, one by the scheduler (tp_worker.py, scheduler.py of 0.5.23).
        ({"max_total_num_tokens": 400_000, "max_req_input_len": 2042}, 2046, None),
        ({}, 2046, None),
        ({"max_total_num_tokens": 600, "max_req_input_len": 594}, 598, "cache holds 600 tokens, less than its context of 2048"),
        ({"max_total_num_tokens": 600}, 598, "cache holds 600 tokens"),
        ({"max_req_input_len": 594}, 598, "longest request is 599 tokens"),
        ({"max_total_num_tokens": "600", "max_req_input_len": -1}, 2046, None),
        # Drafts of speculation have their place in the context as well (managers/utils.py).
        (
            {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 5, "speculative_eagle_topk": 4,
             "speculative_num_draft_tokens": 16}, 2048 - 20, None,
        ),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 64}, 2048 - 64, None),
        ({"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}, 2046, None),
        ({"speculative_algorithm": None, "speculative_num_draft_tokens": 16}, 2046, None),
    ],
)  # fmt: skip
def test_sglang_tells_how_much_room_it_has(told, room, says):
    """Answers that don't fit are cut short there, and called `length`."""
    info = reply("sglang_server_info").json() | told
    facts = adapter(kind="sglang").read_probe([reply("sglang_models"), Reply(200, {}, orjson.dumps(info))])
    assert (facts.context_length, facts.room) == (2048, room)
    assert (facts.warning is None) if says is None else says in facts.warning


def test_vllm_tells_what_it_is():
    facts = adapter(kind="vllm").read_probe([reply("vllm_models"), reply("vllm_version")])
    assert (facts.engine, facts.version, facts.context_length) == ("vllm", "0.32.0", 2048)
    assert (facts.models, facts.weights) == (("/models/smollm2",), "/models/smollm2")


def test_vllm_names_the_stop_token_only_when_it_is_not_the_first_of_the_model():
    answer = adapter(kind="vllm").read(request(), reply("vllm_stop"), 0.0)
    assert (answer.output_ids[-1], answer.matched_stop) == (2, None)
    answer = adapter(kind="vllm").read(request(), reply("vllm_stop_id"), 0.0)
    assert (answer.output_ids, answer.matched_stop) == ([0], 0)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("wrong_model", "wait", "The model `other` does not exist.*the endpoint does not serve the model"),
        ("wrong_path", "wait", "Not Found: the endpoint does not know this path"),
        ("bad_field", "permanent", r"top_p must be in \(0, 1\], got 7.0"),
    ],
)
def test_vllm_says_what_it_refuses(name, kind, says):
    failure = adapter(kind="vllm").read(request(), reply(f"vllm_{name}"), 0.0)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.outcome) == (kind, "rejected")
    assert re.search(says, failure.reason)


@pytest.mark.parametrize("engine", ENGINES.values())
def test_an_endpoint_that_tells_nothing_is_not_an_error(engine):
    one = adapter(**engine)
    facts = one.read_probe([None for _ in one.probe()])
    assert facts.vocab_size is None
    assert facts.models == ()


# --- pauses that servers ask for ---


@pytest.mark.parametrize(
    ("headers", "metadata", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({"retry-after": "0.5"}, {}, 0.5),
        ({"Retry-After-Ms": "1500", "Retry-After": "9"}, {}, 1.5),
        ({"Retry-After": "Fri, 15 Jan 2027 08:00:30 GMT"}, {}, 30.0),
        ({"Retry-After": "Fri, 15 Jan 2027 07:00:00 GMT"}, {}, 0.0),
        ({}, {"headers": {"X-RateLimit-Reset": "1800000012000"}}, 12.0),
        ({"x-ratelimit-reset": "1800000012"}, {}, 12.0),
        ({"x-ratelimit-reset": "4"}, {}, 4.0),
        ({"Retry-After": "soon"}, {}, None),
        ({"Retry-After": "inf"}, {}, None),
        ({"Retry-After": "-5"}, {}, 0.0),
        ({"Retry-After": "1e300"}, {}, 1e9),
        ({"Retry-After": "Mon, 01 Jan 99999999999 00:00:00 GMT"}, {}, None),
        ({}, {}, None),
    ],
)
def test_pauses(headers, metadata, seconds):
    assert retry_after(headers, metadata, now=1_800_000_000.0) == seconds


@pytest.mark.parametrize(
    ("status", "kind", "outcome", "most"),
    [
        (400, "permanent", "rejected", None),
        (413, "permanent", "rejected", None),
        (422, "permanent", "rejected", None),
        (406, "retry", "rejected", 2),  # a firewall that dislikes a prompt
        (410, "retry", "rejected", 2),  # a model that is gone: others succeed, or nothing counts
        (418, "retry", "rejected", 2),
        (101, "retry", "rejected", 2),
    ],
)
def test_which_refusals_are_about_the_prompt(status, kind, outcome, most):
    failure = read_error(status, {}, b"no", 0.0)
    assert (failure.kind, failure.outcome, failure.most_attempts) == (kind, outcome, most)


def test_excerpts_of_bodies_are_one_line_without_control_characters():
    assert excerpt(b"<html>\r\n <b>\x1b[31mno\x07\xff") == "<html> <b>\ufffd[31mno\ufffd\ufffd"


@pytest.mark.parametrize("name", ["sglang", "sglang_chat", "vllm"])
def test_the_reply_to_another_request_of_ours_is_none(name):
    """Mixed up on the way, by a gateway or a connection that was taken for free."""
    one, mine, other = adapter(**ENGINES[name]), f"{'a' * 32}-0000-000000000003", f"{'b' * 32}-0000-000000000004"
    body = orjson.loads(reply(f"{name}_stop").body)

    def read(reply_id: str) -> Answer | Failure:
        if name == "sglang":
            body["meta_info"]["id"] = reply_id
        else:
            body["id"] = f"cmpl-{reply_id}" if name == "vllm" else reply_id
        return one.read(request(id=mine), Reply(200, {}, orjson.dumps(body)), 0.0)

    assert isinstance(read(mine), Answer)
    assert isinstance(read("an id of the gateway's"), Answer)
    failure = read(other)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.billed) == ("retry", True)
    assert other in failure.reason


# --- hosted APIs: money and providers ---


def hosted_reply(provider: str = "", usage: dict | None = None, **choice: object) -> Reply:
    message = {"role": "assistant", "content": "Four."}
    body = {"id": "gen-1", "model": "m", "provider": provider, "usage": usage or {}}
    choices = [{"index": 0, "finish_reason": "stop", "message": message, **choice}]
    return Reply(200, {}, orjson.dumps({**body, "choices": choices}))


@pytest.mark.parametrize(
    ("usage", "cost", "elsewhere"),
    [
        ({"cost": 0.25}, 0.25, False),
        ({}, None, False),
        ({"cost": 0, "is_byok": False}, 0.0, False),  # a free model
        # A key of one's own: the fee, and the provider's bill beside it.
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.5}}, 0.5, False),
        ({"cost": 0.025, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.5}}, 0.525, False),
        ({"cost": 0, "is_byok": True}, 0.0, True),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": None}}, 0.0, True),
        ({"is_byok": True, "cost_details": None}, None, True),
        # Without one the provider's price is a part of the cost, not to be paid again.
        ({"cost": 0.5, "cost_details": {"upstream_inference_cost": 0.5}}, 0.5, False),
        ({"cost": 0, "cost_details": {"upstream_inference_cost": 0.5}}, 0.5, False),
        ({"cost": "0.25"}, 0.25, False),
        ({"cost": "free"}, None, False),
        ({"cost": "nan", "is_byok": "yes"}, None, False),
    ],
)
def test_what_an_answer_cost(usage, cost, elsewhere):
    answer = adapter(kind="openai", endpoints=["https://x"]).read(request(), hosted_reply(usage=usage), 0.0)
    assert (answer.cost_usd, answer.billed_elsewhere) == (cost, elsewhere)


@pytest.mark.parametrize(
    ("routing", "provider", "obeyed"),
    [
        ({"ignore": ["fireworks/nvfp4"]}, "Fireworks", True),
        ({"ignore": ["fireworks/nvfp4"]}, "Fireworks/NVFP4", False),
        ({"ignore": ["fireworks"]}, "Fireworks", False),
        ({"ignore": ["deepinfra/fp4", "baseten"]}, "DeepInfra", True),
        ({"ignore": ["google-vertex"]}, "Google AI Studio", True),
        ({"only": ["google-vertex"]}, "Google", True),
        ({"only": ["mancer"]}, "Mancer 2", True),
        ({"only": ["moonshotai/int4"]}, "Moonshot AI", True),
        ({"only": ["deepinfra/fp8"]}, "Fireworks", False),
        ({"order": ["together"], "allow_fallbacks": False}, "Together", True),
        ({"order": ["together"], "allow_fallbacks": False}, "Novita", False),
        ({"order": ["together"]}, "Novita", True),
    ],
)
def test_which_provider_may_answer(routing, provider, obeyed):
    one = adapter(kind="openai", endpoints=["https://x"], routing=routing)
    read = one.read(request(), hosted_reply(provider), 0.0)
    assert isinstance(read, Answer if obeyed else Failure), read


def test_a_hosted_server_may_stop_at_texts_of_its_own_but_not_at_numbers_that_are_none():
    one = adapter(kind="openai", endpoints=["https://x"])
    assert isinstance(one.read(request(), hosted_reply(matched_stop="<|im_end|>"), 0.0), Answer)
    failure = one.read(request(), hosted_reply(matched_stop="NaN happened"), 0.0)
    assert (failure.kind, failure.billed, failure.odd) == ("retry", True, True)


@pytest.mark.parametrize("name", ["sglang", "sglang_chat", "vllm"])
@pytest.mark.parametrize("matched", ["NaN happened", "", [2], -1, 2.5, {"id": 2}])
def test_an_exact_engine_stops_at_ids_only(name, matched):
    body = orjson.loads(reply(f"{name}_stop").body)
    if name == "sglang":
        body["meta_info"]["finish_reason"]["matched"] = matched
    else:
        body["choices"][0]["matched_stop" if name == "sglang_chat" else "stop_reason"] = matched
    failure = adapter(**ENGINES[name]).read(request(), Reply(200, {}, orjson.dumps(body)), 0.0)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.billed, failure.odd, failure.most_attempts) == ("retry", True, True, 2)
    assert "which is no token" in failure.reason


@pytest.mark.parametrize(
    ("ids", "finish", "kept", "flagged"),
    [
        ([5, 6, 2], "stop", [5, 6, 2], False),
        ([5, 6, 2, 9], "stop", [5, 6, 2], True),
        ([5, 2, 6, 0], "length", [5, 2], True),
        ([0, 2], "stop", [0], True),
        ([5, 6, 7], "length", [5, 6, 7], False),
    ],
)
def test_nothing_follows_the_first_stop_token(ids, finish, kept, flagged):
    body = orjson.loads(reply("vllm_stop").body)
    body["choices"][0].update(token_ids=ids, finish_reason=finish)
    body["usage"]["completion_tokens"] = len(ids)
    answer = adapter(kind="vllm").read(request(max_tokens=len(ids)), Reply(200, {}, orjson.dumps(body)), 0.0)
    assert answer.output_ids == kept
    assert answer.finish_reason == ("stop" if flagged else finish)
    assert answer.flags == (["ids_after_stop"] if flagged else [])


@pytest.mark.parametrize("encoding", ["gzip, gzip", "GZIP", "deflate", ""])
def test_bodies_are_unpacked(encoding):
    body = reply("sglang_stop").body
    for _ in encoding.split(",") if encoding else ():
        raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        body = gzip.compress(body) if "gzip" in encoding.lower() else raw.compress(body) + raw.flush()
    answer = adapter(kind="sglang").read(request(), Reply(200, {"content-encoding": encoding}, body), 0.0)
    assert answer.output_ids == ANSWER_IDS


def test_a_damaged_or_unasked_encoding_is_said():
    broken = Reply(200, {"content-encoding": "gzip"}, gzip.compress(b"{}")[:-9] + b"xxxxxxxxx")
    failure = adapter(kind="sglang").read(request(), broken, 0.0)
    assert failure.kind in ("retry", "fatal")
    failure = adapter(kind="sglang").read(request(), Reply(200, {"content-encoding": "zstd"}, b"x"), 0.0)
    assert (failure.kind, failure.billed) == ("fatal", True)
    assert "`zstd`" in failure.reason


def test_more_fields_are_sent_as_configured():
    extra = {"reasoning": {"enabled": False}, "transforms": []}
    _, body = sent(adapter(kind="openai", endpoints=["https://x"], extra_body=extra))
    assert (body["reasoning"], body["transforms"]) == ({"enabled": False}, [])


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"kind": "openai", "extra_body": {"max_tokens": 5, "n": 2}}, "engine.extra_body: max_tokens, n: set by this"),
        ({"kind": "openai", "extra_body": {"stream": True}}, "engine.extra_body: stream"),
        ({"kind": "sglang", "extra_body": {"a": 1}}, "engine.extra_body: kind `sglang` is asked by ids"),
    ],
)
def test_fields_that_are_not_the_users_are_refused(engine, says):
    with pytest.raises(UserError, match=says):
        adapter(**engine, endpoints=["https://x"])


def test_errors_and_probes_are_unpacked_as_well():
    body = b'{"error": {"message": "This model\'s maximum context length is 2048", "code": 400}}'
    failure = adapter(kind="sglang").read(request(), Reply(400, {"content-encoding": "gzip"}, gzip.compress(body)), 0.0)
    assert failure.outcome == "prompt_too_long"
    assert Reply(200, {}, b"\xef\xbb\xbf" + b'{"version": "1"}').json() == {"version": "1"}


@pytest.mark.parametrize("engine", [*ENGINES.values(), {"kind": "openai", "endpoints": ["https://x"]}])
def test_without_a_seed_none_is_sent(engine):
    _, body = sent(adapter(**engine), seed=None)
    assert not {"seed", "sampling_seed"} & {*body, *body.get("sampling_params", {})}


def test_llamacpp_draws_its_own_seed_when_none_is_sent():
    assert isinstance(adapter(kind="llamacpp").read(request(seed=None), reply("llamacpp_stop"), 0.0), Answer)


@pytest.mark.parametrize(
    ("told", "means"),
    [
        ("eos", "stop"),  # Together (openai-dotnet PR 267)
        ("eos_token", "stop"),  # TGI (dstack PR 2229)
        ("stop_sequence", "stop"),
        ("end_turn", "stop"),  # Bedrock's gateway (its issue 11)
        ("STOP", "stop"),  # Gemini
        ("MAX_TOKENS", "length"),
        ("max_tokens", "length"),
        ("SAFETY", "content_filter"),
        ("tool_use", "tool_calls"),
        ("function_call", "tool_calls"),
    ],
)
def test_gateways_have_their_own_words_for_the_end(told, means):
    """An answer that was taken for none would be paid six times."""
    answer = adapter(kind="openai", endpoints=["https://x"]).read(request(), hosted_reply(finish_reason=told), 0.0)
    assert answer.finish_reason == means


@pytest.mark.parametrize("told", ["model_length_unknown", "", 7, ["stop"], {"type": "stop"}, "abort", "cancelled"])
def test_an_unknown_end_is_no_answer(told):
    failure = adapter(kind="openai", endpoints=["https://x"]).read(request(), hosted_reply(finish_reason=told), 0.0)
    assert (failure.kind, failure.billed) == ("retry", True)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"completion_tokens_details": {"reasoning_tokens": 55}}, 55),
        ({"reasoning_tokens": 7}, 7),
        ({"completion_tokens_details": None}, None),
        ({"completion_tokens_details": {"reasoning_tokens": "many"}}, None),
    ],
)
def test_the_tokens_of_a_hidden_thought_are_read(usage, tokens):
    answer = adapter(kind="openai", endpoints=["https://x"]).read(request(), hosted_reply(usage=usage), 0.0)
    assert answer.reasoning_tokens == tokens
