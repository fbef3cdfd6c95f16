"""Replies whose fields are of other types than they should be: one more kind of failure, never a crash.

Every value in every recorded reply is replaced by values of all other kinds.
"""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Sampling
from scripts.lib.core.records import Message
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, EngineFacts, Failure, Reply, Request

REPLIES = Path(__file__).parent / "replies"
# JSON texts; the last ones are nested deeper than orjson writes.
ODD = ["null", "true", "-1", "7", "9223372036854775808", "0.5", "1e308", '""', '"x"', "[]", '["x"]', "[1.5]", "[-1]"]
ODD += ["[[1]]", "[null]", "[true]", "{}", '{"x": 1}', "[" * 900 + "]" * 900, '{"x":' * 900 + "1" + "}" * 900]
_MARK = "the odd value"
ANSWERS = {
    "llamacpp_stop": {"kind": "llamacpp"},
    "sglang_stop": {"kind": "sglang"},
    "sglang_length": {"kind": "sglang"},
    "sglang_chat_stop": {"kind": "sglang", "api": "chat"},
    "vllm_stop": {"kind": "vllm"},
    "vllm_stop_id": {"kind": "vllm"},
}
PROBES = {
    "llamacpp": ["llamacpp_models", "llamacpp_props"],
    "sglang": ["sglang_models", "sglang_server_info"],
    "vllm": ["vllm_models", "vllm_version"],
}
HOSTED = {
    "id": "gen-1",
    "model": "m",
    "provider": "Somebody",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {
                "role": "assistant",
                "content": "Four.",
                "reasoning": "Two and two.",
                "reasoning_details": [{"type": "reasoning.text", "text": "Two and two."}],
            },
        }
    ],
    "usage": {"prompt_tokens": 12, "completion_tokens": 5, "cost": 0.001},
}


def adapter(**engine):
    settings = {"served_model": "m", **engine}
    return adapter_for(parse_config({"engine": settings, "datasets": {"d": {"class": "B", "source": "x"}}}, "test"))


def load(name: str) -> Any:
    return orjson.loads((REPLIES / f"{name}.json").read_bytes())["body"]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths to all values in a JSON value, its own first. Of long lists the first entries."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def variants(value: Any) -> Iterator[tuple[tuple, str, bytes]]:
    """(path, odd JSON, JSON of the whole with the value there replaced)."""
    for path in places(value):
        whole = [copy.deepcopy(value)]
        inner: Any = whole
        for key in (0, *path[:-1]) if path else ():
            inner = inner[key]
        inner[path[-1] if path else 0] = _MARK
        text = orjson.dumps(whole[0])
        for odd in ODD:
            yield path, odd[:40], text.replace(b'"%b"' % _MARK.encode(), odd.encode())


def check_answer(answer: Answer, exact: bool) -> None:
    assert answer.finish_reason in ("stop", "length", "content_filter", "tool_calls")
    if exact:
        assert type(answer.output_ids) is list
        assert all(type(token) is int and token >= 0 for token in answer.output_ids)
    assert type(answer.matched_stop) in (int, type(None))
    for text in (answer.text, answer.reasoning):
        assert type(text) in (str, type(None))
    for count in (answer.prompt_tokens, answer.output_tokens):
        assert type(count) in (int, type(None))
        assert count is None or count >= 0
    assert type(answer.model) is str
    assert type(answer.provider) is str
    assert answer.cost_usd is None or (type(answer.cost_usd) is float and answer.cost_usd >= 0)
    assert answer.cost_usd is None or math.isfinite(answer.cost_usd)


@pytest.mark.parametrize("name", [*ANSWERS, "hosted"])
def test_an_answer_with_an_odd_field_is_a_failure_or_still_an_answer(name):
    engine = {"kind": "openai", "endpoints": ["https://x"]} if name == "hosted" else ANSWERS[name]
    one, recorded = adapter(**engine), HOSTED if name == "hosted" else load(name)
    meta = recorded.get("meta_info", {})
    count = meta.get("prompt_tokens") or recorded.get("tokens_evaluated") or recorded["usage"]["prompt_tokens"]
    request = Request("p-0-1", [1] * count, 8, 7, Sampling(), messages=[Message("user", "Hi.")])
    kinds = set()
    for path, odd, body in variants(recorded):
        try:
            result = one.read(request, Reply(200, {}, body), 0.0)
            kinds.add(type(result))
            if isinstance(result, Answer):
                check_answer(result, one.exact)
            else:
                assert isinstance(result, Failure)
                assert type(result.reason) is str
        except Exception as error:
            raise AssertionError(f"{path} = {odd}: {error!r}") from error
    assert kinds == {Answer, Failure}


@pytest.mark.parametrize("status", [400, 402, 403, 404, 429, 500, 503])
def test_an_error_with_an_odd_field_is_a_failure(status):
    metadata = {"raw": "x", "reasons": ["y"], "limit_source": "z", "headers": {"X-RateLimit-Reset": "5"}}
    error = {"object": "error", "error": {"message": "No.", "code": "7", "type": "t", "metadata": metadata}}
    for path, odd, body in variants(error):
        try:
            for one in (adapter(kind="sglang"), adapter(kind="openai", endpoints=["https://x"])):
                for code in (status, 200):
                    assert isinstance(one.read(request_of(), Reply(code, {}, body), 0.0), Failure)
        except Exception as problem:
            raise AssertionError(f"{path} = {odd}: {problem!r}") from problem


def request_of() -> Request:
    return Request("p-0-1", [1], 8, 7, Sampling(), messages=[Message("user", "Hi.")])


@pytest.mark.parametrize("kind", PROBES)
def test_a_probe_with_an_odd_field_tells_less(kind):
    one, recorded = adapter(kind=kind), [load(name) for name in PROBES[kind]]
    for number in range(len(recorded)):
        for path, odd, body in variants(recorded[number]):
            bodies = [*map(orjson.dumps, recorded[:number]), body, *map(orjson.dumps, recorded[number + 1 :])]
            try:
                facts = one.read_probe([Reply(200, {}, each) for each in bodies])
                assert isinstance(facts, EngineFacts)
                assert all(type(model) is str for model in facts.models)
                assert type(facts.version) in (str, type(None))
                assert type(facts.weights) in (str, type(None))
                for count in (facts.context_length, facts.vocab_size):
                    assert count is None or (type(count) is int and count > 0)
            except Exception as error:
                raise AssertionError(f"{path} = {odd}: {error!r}") from error


def test_a_stream_with_an_odd_event_is_a_failure_or_still_an_answer():
    one = adapter(kind="openai", endpoints=["https://x"])
    event = {"model": "m", "choices": [{"delta": {"content": "Four."}, "finish_reason": "stop"}]}
    for path, odd, body in variants(event):
        stream = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        try:
            result = one.read(request_of(), Reply(200, {"content-type": "text/event-stream"}, stream), 0.0)
            if isinstance(result, Answer):
                check_answer(result, False)
        except Exception as error:
            raise AssertionError(f"{path} = {odd}: {error!r}") from error
