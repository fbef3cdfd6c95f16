"""Canaries and supervision: endpoints are used only while they answer sensibly, and distrusted backwards."""

import asyncio
import random
import re
import time

import orjson
import pytest

from scripts.lib.client.canary import Canary, degenerate, mismatch
from scripts.lib.client.pool import Pool
from scripts.lib.client.supervision import Supervisor
from scripts.lib.client.vouching import Voided, Vouching
from scripts.lib.config.file import parse_config
from scripts.lib.core.errors import UserError
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, EngineFacts, Failure, Reply
from scripts.lib.fleet.lease import Endpoint
from tests import families

TARGET = families.target("kimi-k2.5-instant")
STOP = 163586
GOOD = [*TARGET.encode("So the answer is 4."), STOP]


def config(**engine):
    settings = {"kind": "llamacpp", "endpoints": ["http://u0"], **engine}
    return parse_config({"engine": settings, "datasets": {"d": {"class": "B", "source": "x"}}}, "test")


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (GOOD, None),
        ([STOP], "an empty answer"),
        ([], "an empty answer"),
        ([0] * 48, "only 1 different"),
        ([7, 8] * 24, "only 2 different"),
        ([7] * 5 + [STOP], None),  # short: a weak model, not a broken engine
    ],
)
def test_degenerate_answers(ids, problem):
    found = degenerate(ids, TARGET.eos_ids)
    assert (found is None) if problem is None else problem in found


NOISE = [*TARGET.encode("owl mill sacks counted thought three"), STOP]


@pytest.fixture
def canary(tmp_path):
    return Canary(config(), TARGET, adapter_for(config()), None, tmp_path)


def judged(one: Canary, ids: list[int], url: str = "http://u0") -> str | None:
    return one.judge(url, Answer("stop", output_ids=ids))


def test_a_model_that_knew_the_answer_must_go_on_knowing_it(canary):
    assert judged(canary, GOOD) is None
    assert "was answered well before" in judged(canary, NOISE)


def test_a_model_that_never_knew_it_is_not_blamed(canary):
    assert judged(canary, NOISE) is None
    assert judged(canary, NOISE) is None


def test_each_endpoint_is_held_to_what_it_has_shown_itself(canary):
    """A server that is well but answers otherwise (another quantization) is not blamed for what others know."""
    assert judged(canary, GOOD) is None
    assert judged(canary, NOISE, "http://u1") is None
    assert judged(canary, NOISE, "http://u1") is None
    assert "was answered well before" in judged(canary, NOISE)
    assert "was answered well before" in judged(canary, NOISE)  # however often it is tested again


def test_a_model_that_knows_it_now_and_then_is_soon_left_alone(canary, tmp_path):
    dice = random.Random(5)
    blamed = [judged(canary, GOOD if dice.random() < 0.5 else NOISE) is not None for _ in range(200)]
    assert sum(blamed) <= 5
    judged(canary, NOISE)
    assert judged(Canary(config(), TARGET, adapter_for(config()), None, tmp_path), NOISE) is None


def test_later_jobs_know_what_an_endpoint_knows(canary, tmp_path):
    """Else the engine that broke before a job was killed would pass the next one's first canary."""
    judged(canary, GOOD)
    later = Canary(config(), TARGET, adapter_for(config()), None, tmp_path)
    assert "was answered well before" in judged(later, NOISE)
    assert f"delete {tmp_path / 'canaries'}/" in judged(later, NOISE)
    assert judged(later, NOISE, "http://u1") is None
    other = Canary(config(served_model="another"), TARGET, adapter_for(config()), None, tmp_path)
    assert judged(other, NOISE) is None


def test_an_id_outside_the_vocabulary_is_no_answer(canary):
    assert judged(canary, [163840, STOP]) == "id 163840 is outside the vocabulary of 163840"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer("stop", text="4", reasoning="Hm."), None),
        (Answer("stop", text="4", reasoning="Simple arithmetic question"), None),  # no word of "question4"
        (Answer("stop", text="The answer is 5."), None),  # of another provider's model: nothing is void for it
        (Answer("length", text="", reasoning="Let me count on my fingers"), None),
        (Answer("stop", text=" "), "an empty answer"),
        (Answer("stop", text="!" * 200), "only 1 different"),
        (Answer("length", text="", reasoning=" the the" * 100), "only 1 different"),
    ],
)
def test_text_answers_are_only_held_to_be_no_noise(answer, problem, canary):
    for _ in range(3):
        found = canary.judge("http://u0", answer)
        assert (found is None) if problem is None else problem in (found or "")


THINKING = families.target("kimi-k2-thinking")


def thought(text: str, content: str | None) -> list[int]:
    whole = f"<think>{text}</think>{content}" if content is not None else f"<think>{text}"
    return [*THINKING.encode(whole), *([STOP] if content is not None else [])]


def test_a_thinking_model_is_judged_by_what_it_says_after_its_thought(tmp_path):
    one = Canary(config(), THINKING, adapter_for(config()), None, tmp_path)
    assert judged(one, thought("Two fingers and two more", "4")) is None
    assert judged(one, thought("Is it 4? Or", None)) is None  # cut in its thought: neither right nor wrong
    assert "was answered well before" in judged(one, thought("It is 4, so I say", "a fish"))


def test_a_thinking_model_has_room_for_its_thought(tmp_path):
    asked = []

    class Asked(Wire):
        async def call_within(self, seconds, url, call):
            asked.append((orjson.loads(call.body)["n_predict"], seconds))
            return Failure("wait", "x")

    for target in (THINKING, families.target("llama-3.1")):
        asyncio.run(Canary(config(), target, adapter_for(config()), Asked(), tmp_path).ask("http://u0"))
    assert asked == [(512, 60 + 256), (48, 60 + 24)]


@pytest.mark.parametrize(
    ("facts", "engine", "says"),
    [
        (EngineFacts("llamacpp", vocab_size=49152), {}, "49152 token ids, the target .* has 163840"),
        (
            EngineFacts("sglang", models=("other",)),
            {"kind": "sglang", "served_model": "k2"},
            "not serve `k2` but other",
        ),
        (EngineFacts("llamacpp", context_length=8), {}, "context of 8 tokens"),
        (EngineFacts("llamacpp", vocab_size=163840, context_length=4096, models=("/a/path.gguf",)), {}, None),
        (EngineFacts("vllm", models=("k2",)), {"kind": "vllm", "served_model": "k2"}, None),
        (EngineFacts("openai"), {"kind": "openai"}, None),
        (EngineFacts("openai", models=("a/k2",)), {"kind": "openai", "served_model": "a/k2:floor"}, None),
    ],
)
def test_what_serves_must_be_what_was_asked_for(facts, engine, says):

    found = mismatch(facts, adapter_for(config(**engine)), TARGET)
    assert (found is None) if says is None else re.search(says, found)


# --- supervision ---


class Wire:
    """A transport whose replies are set by the test; `down` is a failure instead."""

    def __init__(self):
        self.ids, self.down, self.asked = GOOD, None, 0

    async def call_within(self, seconds, url, call):
        if self.down:
            return self.down
        if call.path != "/completion":
            return Reply(200, {}, b'{"data": [{"id": "m", "meta": {"n_vocab": 163840, "n_ctx": 2048}}]}')
        self.asked += 1
        prompt = orjson.loads(call.body)["prompt"]
        body = {"tokens": self.ids, "stop_type": "eos", "tokens_evaluated": len(prompt)}
        return Reply(200, {}, orjson.dumps(body))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class House:
    """A supervisor with one endpoint."""

    def __init__(self, tmp_path):
        self.clock, self.wire, self.lines, self.voided = Clock(), Wire(), [], []
        self.pool = Pool(8, self.clock, 1e9, 600)
        settings = config()
        judge = Canary(settings, TARGET, adapter_for(settings), self.wire, tmp_path)
        self.position, self.proven = 0, []
        self.vouching = Vouching(self, lambda names: None, answered=True)
        self.supervisor = Supervisor(
            settings,
            8,
            None,
            self.pool,
            judge,
            self.wire,
            self.vouching,
            self.lines.append,
        )
        self.pool.update([("http://u0", 0)])
        self.server = self.pool.servers["http://u0"]

    def prove(self, url, before):
        self.proven.append((url, before))

    def void(self, url, since):
        self.voided.append(since)
        return Voided(set(), set())

    def answer(self, count):
        """Answers come and are journalled."""
        for _ in range(count):
            self.vouching.arrived("http://u0")
            self.position += 100

    @property
    def doubtful(self):
        return self.vouching.doubtful("http://u0")

    def odd(self):
        for _ in range(5):
            self.vouching.answered("http://u0", odd=True)

    def test(self):
        asyncio.run(self.supervisor.test(self.server))


def test_an_endpoint_is_admitted_after_probe_and_canary(tmp_path):
    house = House(tmp_path)
    house.test()
    assert house.server.status == "ready"
    assert house.supervisor.context_length == 2048
    assert house.supervisor.facts.vocab_size == 163840


def test_a_good_canary_proves_what_came_before_it(tmp_path):
    house = House(tmp_path)
    house.test()
    house.answer(2)
    house.test()
    assert house.doubtful == 0
    assert house.proven == [("http://u0", 200)]
    assert house.voided == []


def test_what_comes_while_a_canary_is_out_is_left_to_the_next_one(tmp_path):
    house = House(tmp_path)
    house.test()
    house.answer(2)
    call = house.wire.call_within

    async def slowly(*arguments, **named):
        house.answer(3)
        return await call(*arguments, **named)

    house.wire.call_within = slowly
    house.test()
    assert house.doubtful == 3
    assert house.proven == [("http://u0", 200)]


def test_a_broken_engine_is_taken_out_and_its_answers_since_the_last_good_canary_are_distrusted(tmp_path):
    house = House(tmp_path)
    house.test()
    house.answer(1)
    house.test()
    house.answer(2)
    house.wire.ids = [0] * 48
    house.test()
    assert house.voided == [100]
    assert (house.server.status, house.doubtful) == ("out", 0)
    assert any("fails its canary" in line and "; 2 answers since" in line for line in house.lines)
    house.wire.ids = GOOD
    house.test()
    assert house.server.status == "ready"


def test_an_unreachable_endpoint_is_not_distrusted(tmp_path):
    house = House(tmp_path)
    house.test()
    house.answer(1)
    house.wire.down = Failure("retry", "HTTP 500")
    house.test()
    assert house.doubtful == 1
    assert house.voided == []


def test_canaries_of_a_dead_server_become_rarer(tmp_path):
    house = House(tmp_path)
    house.wire.down = Failure("wait", "can't connect")
    pauses = []
    for _ in range(9):
        assert house.supervisor.due_for_test() == [house.server]
        house.test()
        assert house.supervisor.due_for_test() == []
        pauses.append(house.supervisor.watch(house.server).test_at - house.clock.now)
        house.clock.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_limit_that_a_canary_meets_is_read_by_the_clock(tmp_path):
    """`X-RateLimit-Reset` is an instant: 200 ms from now is not the end of the world."""
    house = House(tmp_path)
    probe = house.wire.call_within

    async def limited(seconds, url, call):
        if call.path != "/completion":
            return await probe(seconds, url, call)
        reset = {"X-RateLimit-Reset": str(int(time.time() * 1000) + 200)}
        return Reply(429, {}, orjson.dumps({"error": {"message": "slow", "metadata": {"headers": reset}}}))

    house.wire.call_within = limited
    house.test()
    assert house.server.status == "new"
    house.clock.now = 1.0
    assert house.supervisor.due_for_test() == [house.server]


def test_an_endpoint_whose_canary_meets_a_limit_of_days_is_not_tested_before_it_resets(tmp_path):
    house = House(tmp_path)
    house.pool.update([("http://u0", 0), ("http://u1", 0)])
    house.wire.down = Failure("throttle", "HTTP 429: monthly", retry_after=99999999.0)
    house.test()
    other = house.pool.servers["http://u1"]
    assert house.supervisor.due_for_test() == [other]
    house.clock.now = 99999998.0
    assert house.supervisor.due_for_test() == [other]
    house.clock.now = 100000000.0
    assert house.supervisor.due_for_test() == [house.server, other]
    house.pool.update([("http://u0", 0)])
    with pytest.raises(UserError, match="its limit resets in"):
        house.test()


def test_an_endpoint_that_is_not_up_yet_is_tested_again_later(tmp_path):
    house = House(tmp_path)
    house.wire.down = Failure("wait", "can't connect")
    house.test()
    assert house.server.status == "new"
    assert house.supervisor.due_for_test() == []
    house.clock.now = 1.0
    assert house.supervisor.due_for_test() == [house.server]
    assert house.server.reason == "can't connect"


def test_an_endpoint_with_another_model_stops_the_run_before_any_prompt_is_spent(tmp_path):
    house = House(tmp_path)

    async def other(seconds, url, call):
        return Reply(200, {}, b'{"data": [{"id": "m", "meta": {"n_vocab": 32000}}]}')

    house.wire.call_within = other
    with pytest.raises(UserError, match=r"http://u0: serves a model with 32000 token ids"):
        house.test()


def test_odd_answers_in_a_row_call_for_a_canary_at_once(tmp_path):
    async def scenario():
        house = House(tmp_path)
        await house.supervisor.test(house.server)
        before = house.wire.asked
        house.answer(1)
        house.odd()
        house.supervisor._start_tests()
        await asyncio.gather(*house.supervisor._tests)
        assert house.wire.asked == before + 1
        assert not house.vouching.odd("http://u0")

    asyncio.run(scenario())


@pytest.mark.parametrize("well", [True, False])
def test_an_endpoint_is_tested_once_more_when_it_is_busy(well, tmp_path):
    """Broken kernels often answer well alone, and badly among many."""

    async def scenario():
        house = House(tmp_path)
        await house.supervisor.test(house.server)
        house.answer(3)
        asked, voided = [], []
        for in_flight in (3, 4, 8, 8):  # of 8 that may be
            house.server.in_flight = in_flight
            house.wire.ids = GOOD if well or in_flight < 4 else [0] * 48
            before = house.wire.asked
            house.supervisor._start_tests()
            await asyncio.gather(*house.supervisor._tests)
            asked.append(house.wire.asked - before)
            voided.append(len(house.voided))
        assert asked == ([0, 1, 0, 0] if well else [0, 2, 0, 0])
        assert voided == ([0] * 4 if well else [0, 1, 1, 1])
        assert house.server.status == ("ready" if well else "out")
        house.clock.now, house.wire.ids, house.server.in_flight = 2.0, GOOD, 0
        house.pool.take_out(house.server, "hangs")
        await house.supervisor.test(house.server)
        house.server.in_flight = 8
        house.supervisor._start_tests()  # it is another server now, maybe
        assert len(house.supervisor._tests) == 1
        await asyncio.gather(*house.supervisor._tests)

    asyncio.run(scenario())


def test_canaries_come_every_few_minutes(tmp_path):
    async def scenario():
        house = House(tmp_path)
        await house.supervisor.test(house.server)
        for minutes, asked in [(5, 0), (9.9, 0), (10.1, 1), (15, 0), (20.3, 1)]:
            before = house.wire.asked
            house.clock.now = minutes * 60
            house.supervisor._start_tests()
            await asyncio.gather(*house.supervisor._tests)
            assert house.wire.asked - before == asked, minutes

    asyncio.run(scenario())


def test_at_the_end_unproven_answers_get_a_last_canary(tmp_path):
    async def scenario():
        house = House(tmp_path)
        await house.supervisor.test(house.server)
        before = house.wire.asked
        await house.supervisor.close()
        assert house.wire.asked == before
        house.answer(1)
        await house.supervisor.close()
        assert house.wire.asked == before + 1
        assert house.doubtful == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("ids", [GOOD, [0] * 48], ids=["well", "broken"])
def test_the_end_waits_for_a_canary_that_is_under_way(ids, tmp_path):
    """Else the answers of an engine that broke just before the end would be believed."""

    async def scenario():
        house = House(tmp_path)
        await house.supervisor.test(house.server)
        house.answer(2)
        out, go_on, call = asyncio.Event(), asyncio.Event(), house.wire.call_within

        async def slowly(*arguments, **named):
            out.set()
            await go_on.wait()
            return await call(*arguments, **named)

        house.wire.call_within, house.wire.ids = slowly, ids
        house.odd()
        house.supervisor._start_tests()
        await out.wait()
        house.answer(1)  # the last one, of which this canary says nothing
        end = asyncio.create_task(house.supervisor.close())
        await asyncio.sleep(0)
        assert not end.done()
        go_on.set()
        await end
        assert house.voided == ([] if ids == GOOD else [0])
        assert (house.doubtful, house.server.status) == (0, "ready" if ids == GOOD else "out")

    asyncio.run(scenario())


def test_a_stale_connection_lets_no_broken_engine_through(tmp_path):
    house = House(tmp_path)
    house.test()
    house.answer(1)
    call, stale = house.wire.call_within, [Failure("free", "the server closed the connection without an answer")]

    async def first_stale(*arguments, **named):
        return stale.pop() if stale else await call(*arguments, **named)

    house.wire.call_within, house.wire.ids = first_stale, [0] * 48
    house.test()
    assert house.voided == [0]


def test_endpoints_that_never_answer_are_named_while_the_job_waits_and_when_it_gives_up(tmp_path):
    house = House(tmp_path)
    house.wire.down = Failure("wait", "can't connect")

    class Held:
        def endpoints(self, timeout):
            house.clock.now += 1000  # seconds; transport.outage_seconds is 3600
            return [Endpoint("http://u0", 0)]

        def share(self, ceiling):
            return ceiling

        def metrics(self):
            return {}

    house.supervisor.held = Held()
    with pytest.raises(UserError, match=r"no endpoint has worked for 4000 s \(http://u0: can't connect\)"):
        asyncio.run(house.supervisor._follow())
    assert len(house.lines) == 1
    assert re.search(
        r"no endpoint (works|has answered yet) \(http://u0: .+\): tried again, for 3600 s at most", house.lines[0]
    )


class ThinkingApi:
    """A hosted API that thinks whatever it is told."""

    async def call_within(self, seconds, url, call):
        message = {"role": "assistant", "content": "4", "reasoning": "Two and two."}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        return Reply(200, {}, orjson.dumps({"id": "g1", "model": "m", "choices": choices}))


@pytest.mark.parametrize(("family", "stops"), [("qwen3-no-think", True), ("qwen3", False), ("llama-3.1", False)])
def test_an_api_that_thinks_though_the_target_is_not_to_is_stopped_before_it_is_paid(family, stops, tmp_path):
    settings = config(kind="openai", served_model="m")
    judge = Canary(settings, families.target(family), adapter_for(settings), ThinkingApi(), tmp_path)
    if stops:
        with pytest.raises(UserError, match="the API thinks, the target's template is set not to"):
            asyncio.run(judge.ask("http://u0"))
    else:
        assert asyncio.run(judge.ask("http://u0")) is None
