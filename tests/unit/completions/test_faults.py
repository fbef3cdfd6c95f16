"""What servers really send, and what the client has to make of it: each fault by name.

A row says what one reply of a kind means (`kind` of failure, or an outcome), and what becomes of a prompt that meets
nothing else (`forever`; None: it waits, however often). The replies come from tests/fault_server, in the shapes of
all protocols that can say them. Faults of the client's own side are in ELSEWHERE, with the test that covers each.
"""

import importlib
import random
import re
from dataclasses import dataclass, field

import pytest

from scripts.lib.client.backlog import Work
from scripts.lib.completions.dialogue import Dialogue, Step
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Config
from scripts.lib.core.records import Message, Prompt
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, Failure, Reply, Request
from scripts.lib.target.output import add_text
from tests import families
from tests.fault_server.faults import CLIENT_FAULTS, FAULTS
from tests.fault_server.shapes import CHAT, EXACT, OPENAI, PROTOCOLS, Generation, Wire, good

NOW = 1_800_000_000.0
ATTEMPTS = 6
TARGET = families.target("kimi-k2-thinking")
STOP = next(iter(TARGET.eos_ids & {163586}))
THOUGHT, CONTENT = "The owl counted the sacks.", "So the answer is 30."
ENGINES = {
    "llamacpp": {"kind": "llamacpp"},
    "sglang": {"kind": "sglang"},
    "sglang_chat": {"kind": "sglang", "api": "chat"},
    "vllm": {"kind": "vllm"},
    "openrouter": {"kind": "openai", "endpoints": ["https://api.invalid/v1"]},
}
IDS = tuple(name for name in EXACT if name in ENGINES)  # protocols that return ids, as the client speaks them


@dataclass
class Row:
    """One fault and what it has to mean."""

    fault: str
    means: str  # kind of the failure, or the outcome
    forever: str | None = ""  # outcome when it comes every time; default: as `means`
    protocols: tuple[str, ...] = PROTOCOLS
    billed: bool | None = None
    pause: tuple[float, float] | None = None  # seconds that the reply itself asks for
    flags: set[str] = field(default_factory=set)
    says: str = ""  # pattern in the reason
    exact: bool = False  # the ids that were sampled are in the row, verbatim


TABLE = [
    # 200, and no answer
    Row("abort_200", "retry", "exhausted", billed=True, says="abort|finish reason"),
    Row("finish_null", "retry", "exhausted", billed=True, says="finish reason"),
    Row("no_done", "retry", "exhausted", CHAT, billed=True),
    Row("error_in_200", "retry or throttle", None, says="1015"),
    Row("choices_null", "retry", "exhausted", OPENAI, billed=True),
    Row("choices_empty", "retry", "exhausted", OPENAI, billed=True),
    Row("content_null_stop", "again", "empty"),
    Row("leading_ws", "ok", exact=True),
    Row("sse_comment", "ok", protocols=("openrouter",)),
    Row("sse_split_utf8", "ok", protocols=IDS, exact=True),
    Row("sse_split_utf8", "ok", protocols=("openrouter",)),
    # 200, and not what it seems
    Row("reasoning_only_length", "reasoning_only", protocols=CHAT, flags={"truncated"}),
    Row("answer_in_reasoning", "reasoning_only", protocols=("openrouter",), flags={"answer_in_reasoning"}),
    Row("reasoning_in_content", "ok", protocols=("sglang_chat",), exact=True),
    Row("field_reasoning", "ok", protocols=CHAT),
    Row("reasoning_ws_stripped", "ok", protocols=CHAT),
    Row("tool_leak", "unexpected_tool_call", protocols=CHAT),
    Row("tool_calls_loop", "unexpected_tool_call", protocols=CHAT),
    Row("repeat_loop", "repetition", protocols=IDS, says="pattern of 5"),
    Row("nan_bang", "repetition", protocols=IDS, says="pattern of 1"),
    Row("stray_tokens", "ok", protocols=IDS),
    Row("usage_missing", "ok", exact=True),
    Row("usage_wrong", "ok", protocols=IDS, flags={"usage_mismatch"}, exact=True),
    Row("last_batch_lost", "retry", "rejected", ("llamacpp", "vllm"), says="stop token"),
    Row("last_batch_lost", "ok", protocols=("sglang", "sglang_chat"), exact=True),
    Row("ids_absent", "fatal", protocols=IDS, says="no token ids"),
    Row("ids_shapes", "ok", protocols=IDS, exact=True),
    Row("prompt_ids_differ", "fatal", protocols=IDS, says="prompt"),
    Row("replacement_char", "ok", protocols=("openrouter",), flags={"replacement_character"}),
    Row("model_swap", "fatal", protocols=("openrouter",), says="another-model-8bit"),
    Row("200_overlong_1tok", "length", protocols=IDS, flags={"truncated", "short_of_max_tokens"}),
    Row("content_parts", "ok", protocols=("sglang_chat",), exact=True),
    Row("content_parts", "ok", protocols=("openrouter",), exact=True),
    Row("content_stream_parts", "ok", protocols=("openrouter",)),
    Row("content_unknown", "retry", "rejected", ("openrouter",), billed=True, says="content"),
    Row("unasked_encoding", "ok", exact=True),
    Row("unknown_encoding", "fatal", says="`br`"),
    Row("max_tokens_ignored", "permanent", "rejected", IDS, billed=True, says="ids for max_tokens 400"),
    Row("eos_in_middle", "ok", protocols=IDS, flags={"ids_after_stop"}, exact=True),
    Row("nan_stop", "retry", "rejected", ("sglang", "sglang_chat"), billed=True, says="NaN happened"),
    Row("broken_finish", "retry", "exhausted", IDS, billed=True, says="finish reason|aborted"),
    # errors
    Row("400_duplicate_id", "retry", "exhausted", ("sglang", "sglang_chat", "vllm"), says="Duplicate request ID"),
    Row("400_context", "permanent", "prompt_too_long"),
    Row("400_overlong_input", "permanent", "prompt_too_long", says="61709"),
    Row("400_kimi_reasoning", "permanent", "rejected", CHAT, says="reasoning_content is missing"),
    Row("400_echo", "permanent", "rejected"),
    Row("401_echo", "fatal", says="check the API key"),
    Row("502_echo", "retry", "exhausted"),
    Row("307_echo", "wait", None, says="redirects"),
    Row("answer_echo", "ok", protocols=CHAT),
    Row("stream_echo", "ok", protocols=("openrouter",)),
    Row("404_model", "wait", None, says="does not exist"),
    Row("408_429_529", "retry or throttle", None),
    Row("429_no_retry_after", "throttle", None, pause=(0.19, 0.21)),
    Row("429_soon", "throttle", None, pause=(1, 1)),
    Row("429_for_ages", "throttle", None, pause=(99999999, 99999999), says="per-month"),
    Row("429_upstream", "throttle", None, says="rate-limited upstream"),
    Row("402_credits", "fatal", says="nothing is lost"),
    Row("500_logprob_nan", "retry", "rejected", says="Out of range float"),
    Row("500_client_disc", "retry", "exhausted"),
    Row("500_surrogate", "retry", "exhausted"),
    Row("502_html", "retry", "exhausted", says="50[24].*Gateway"),
    Row("520_cf", "retry", "exhausted", says="520"),
    Row("503_queue", "throttle", None, says="queue is full"),
    Row("503_no_workers", "wait", None, says="No available workers"),
    Row("503_starting", "wait", None, says="Loading model"),
    Row("health_false_negative", "ok", exact=True),
]

# Faults that no reply can show: where they are tested.
ELSEWHERE = {
    "disconnect_idle": "client.test_transport.test_stale_connection_costs_nothing",
    "reset_midbody": "client.test_transport.test_half_a_reply_is_no_answer",
    "short_content_length": "client.test_transport.test_half_a_reply_is_no_answer",
    "silent_stall": "client.test_transport.test_silence_ends_at_the_deadline",
    "timeout_ghost": "client.test_transport.test_ghosts_are_aborted",
    "health_ok_but_hung": "client.test_transport.test_hung_server_is_taken_out",
    "reply_doubled": "client.test_connections.test_each_reply_of_a_hosted_api_goes_to_its_own_request",
    "reply_doubled_late": "client.test_connections.test_what_nobody_asked_for_reaches_no_request",
    "replies_swapped": "client.test_belonging.test_an_answer_to_another_prompt_shows_by_the_count_of_its_tokens",
    "pool_timeout": "client.test_transport.test_no_hidden_limit_of_connections",
    "conn_limit": "client.test_transport.test_no_hidden_limit_of_connections",
    "emfile": "client.test_transport.test_open_files_are_raised_or_refused",
    "eaddrnotavail": "client.test_transport.test_connections_are_reused",
    "resume_wrong_rows": "completions.test_faults_disk.test_resume_goes_by_id",
    "torn_last_line": "completions.test_faults_disk.test_torn_last_line_is_cut_off",
    "mask_all_zero": "completions.test_faults_disk.test_mask_of_zeros_or_ones_is_refused",
    "mask_shift": "completions.test_faults_disk.test_mask_marks_what_was_sampled",
}

CASES = [
    pytest.param(row, protocol, id=f"{row.fault}-{protocol}")
    for row in TABLE
    for protocol in row.protocols
    if protocol in ENGINES
]


def config(protocol: str, **engine: object) -> Config:
    return parse_config(
        {
            "model": {"name": "target"},
            "engine": {"served_model": "target", **ENGINES[protocol], **engine},
            "datasets": {"d": {"class": "B", "source": "x"}},
            "transport": {"attempts": ATTEMPTS},
        },
        "test",
    )


def reply_of(wire: Wire) -> Reply:
    """What the transport makes of a reply on the wire."""
    return Reply(wire.status, {name.lower(): value for name, value in wire.headers.items()}, wire.body)


class Conversation:
    """One prompt, one adapter, and the rules; fed with replies by hand."""

    def __init__(self, protocol: str, **engine: object) -> None:
        settings = config(protocol, **engine)
        self.protocol, self.adapter = protocol, adapter_for(settings)
        self.dialogue = Dialogue(TARGET, "d", settings, 400)
        self.settings = settings.transport
        messages = [Message("user", "Why do you count?")]
        self.work = Work(Prompt("0" * 32, "d", "x:1", "k", messages))
        self.successes = 0  # of other prompts, in between
        self.dice = random.Random(protocol)
        self.ids = [*TARGET.encode(f"<think>{THOUGHT}</think>{CONTENT}"), STOP]

    def request(self) -> Request:
        request = self.dialogue.next_request(self.work)
        assert isinstance(request, Request)
        return request

    def generation(self, request: Request) -> Generation:
        return Generation(request.prompt_ids, self.ids, CONTENT, "stop", THOUGHT, "target", request.id, STOP)

    def meet(self, fault: str | None) -> tuple[Failure | None, Step | None]:
        """Send, get `fault` (None: a good reply), and see what follows."""
        request = self.request()
        generation = self.generation(request)
        wire = FAULTS[fault](self.protocol, generation, self.dice, NOW) if fault else good(self.protocol, generation)
        assert wire is not None
        result = self.adapter.read(request, reply_of(wire), NOW)
        if isinstance(result, Answer):
            result = self.dialogue.answered(self.work, request, result, "http://s", 1.0)
        if isinstance(result, Step):
            return None, result
        if result.kind == "fatal":
            return result, None
        self.successes += 1
        return result, self.failed(result, self.successes)

    def failed(self, failure: Failure, successes: int) -> Step:
        next_try = self.work.attempts.failed(failure, successes, self.settings, random.Random(0))
        return self.dialogue.tried(self.work, next_try)


@pytest.mark.parametrize(("row", "protocol"), CASES)
def test_one_reply(row: Row, protocol: str) -> None:
    """What a single reply means: for the prompt, and for the endpoint."""
    for variant in range(4):
        check_one_reply(row, protocol, variant)


def check_one_reply(row: Row, protocol: str, variant: int) -> None:
    conversation = Conversation(protocol)
    conversation.dice = random.Random(f"{row.fault} {variant}")
    failure, step = conversation.meet(row.fault)
    if failure is None:
        assert step is not None
        if row.means == "again":
            assert (step.kind, step.delay) == ("again", 0.0)
            return
        assert step.kind == "done"
        completion = step.completion
        assert completion is not None
        assert completion.outcome == row.means, completion.reason
        assert re.search(row.says, completion.reason or "")
        for turn in completion.turns:
            assert row.flags <= set(turn.flags)
            assert turn.ids_origin == ("reconstructed" if protocol == "openrouter" else "engine")
            # An assistant turn that is empty must never become one to learn from.
            assert turn.output_ids
        if row.exact:
            assert completion.turns[0].output_ids == conversation.ids
    else:
        assert failure.kind in row.means.split(" or "), failure.reason
        assert re.search(row.says, failure.reason)
        assert "\n" not in failure.reason
        assert row.billed is None or failure.billed == row.billed
        if row.pause:
            assert failure.retry_after is not None
            assert row.pause[0] <= failure.retry_after <= row.pause[1]
            assert step is not None
            assert step.delay >= failure.retry_after


@pytest.mark.parametrize(("row", "protocol"), CASES)
def test_forever(row: Row, protocol: str) -> None:
    """A reply that comes every time ends the prompt in its outcome, after its attempts, or never."""
    conversation = Conversation(protocol)
    forever = row.means if row.forever == "" else row.forever
    # `retry or throttle` is drawn anew each time, and throttling never counts.
    sends = 40 if forever is None and " or " not in row.means else ATTEMPTS + 3
    for _ in range(sends):
        failure, step = conversation.meet(row.fault)
        if failure is not None and failure.kind == "fatal":
            assert forever == "fatal"
            return
        assert step is not None
        if step.kind == "done":
            assert step.completion is not None
            assert forever is None or step.completion.outcome == forever
            assert forever is not None or " or " in row.means, "a prompt was given up for the server's fault"
            assert step.completion.attempts <= (ATTEMPTS if forever else sends)
            return
    assert forever is None


@pytest.mark.parametrize(
    ("row", "protocol"), [case for case in CASES if case.values[0].means in ("retry", "throttle", "wait", "again")]
)
def test_cured(row: Row, protocol: str) -> None:
    """Once, then a good answer: as if nothing had happened."""
    conversation = Conversation(protocol)
    _, step = conversation.meet(row.fault)
    assert step is not None
    assert step.kind == "again"
    failure, step = conversation.meet(None)
    assert failure is None
    assert step is not None
    assert step.completion is not None
    assert step.completion.outcome == "ok"
    assert step.completion.attempts == 2
    if protocol != "openrouter":
        assert step.completion.turns[0].output_ids == conversation.ids


def test_server_that_fails_everything_burns_no_prompt() -> None:
    """Failures count only while something else is answered: 2,000 fast errors in a row cost no attempt."""
    conversation = Conversation("sglang")
    for _ in range(2_000):
        request = conversation.request()
        wire = FAULTS["502_html"]("sglang", conversation.generation(request), conversation.dice, NOW)
        assert wire is not None
        failure = conversation.adapter.read(request, reply_of(wire), NOW)
        assert isinstance(failure, Failure)
        assert conversation.failed(failure, successes=7).kind == "again"
    assert conversation.work.attempts.counted == 1


def test_provider_outside_the_pin_is_refused() -> None:
    """OpenRouter answers from elsewhere although the routing names one provider (ai-sdk-provider issue 153)."""
    conversation = Conversation("openrouter", routing={"only": ["beta"], "allow_fallbacks": False})
    failure, _ = conversation.meet(None)
    assert failure is not None
    assert failure.kind == "fatal"
    assert "Alpha" in failure.reason


def test_reasoning_only_from_ids_keeps_the_thought_and_no_content() -> None:
    """An answer cut inside its thought: nothing of it becomes content, whatever the server's text says."""
    conversation = Conversation("sglang")
    conversation.ids = conversation.ids[:4]
    request = conversation.request()
    generation = conversation.generation(request)
    generation.finish = "length"
    wire = good("sglang", generation)
    answer = conversation.adapter.read(request, reply_of(wire), NOW)
    assert isinstance(answer, Answer)
    step = conversation.dialogue.answered(conversation.work, request, answer, "http://s", 1.0)
    assert isinstance(step, Step)
    assert step.completion is not None
    assert step.completion.outcome == "reasoning_only"
    turn = step.completion.turns[0]
    add_text(conversation.dialogue.target, turn)
    assert turn.content == ""
    assert turn.reasoning
    assert THOUGHT.startswith(turn.reasoning)


def test_all_are_covered() -> None:
    """Every fault by name, and every test that ELSEWHERE names exists."""
    names = {row.fault for row in TABLE} | set(ELSEWHERE)
    assert names == set(FAULTS) | set(CLIENT_FAULTS)
    for path in ELSEWHERE.values():
        module, _, test = path.rpartition(".")
        assert hasattr(importlib.import_module(f"tests.unit.{module}"), test)


def test_shapes_cover_what_adapters_read() -> None:
    """Each protocol's good reply is an answer with the ids that were sampled."""
    assert set(ENGINES) <= set(PROTOCOLS)
    for protocol in ENGINES:
        failure, step = Conversation(protocol).meet(None)
        assert failure is None
        assert step is not None
        assert step.completion is not None
        assert step.completion.outcome == "ok"
