"""Answers without ids: those that belong to another request are found by what their replies tell."""

import orjson
import pytest

from scripts.lib.client.belonging import Belonging
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Sampling
from scripts.lib.core.records import Message
from scripts.lib.engines import adapter_for
from scripts.lib.engines.base import Answer, Failure, Reply, Request
from scripts.lib.engines.request_ids import RequestIds

URL = "https://api.example/v1"


class Api:
    """An endpoint that counts `more` tokens more than we do."""

    def __init__(self, more: int = 3) -> None:
        self.said: list[str] = []
        self.belonging, self.more, self.serial = Belonging(self.said.append), more, 0

    def request(self, length: int, messages: int = 1) -> Request:
        history = [Message("user", "x")] * messages
        return Request(f"r{length}", [5] * length, 100, 1, Sampling(), history)

    def answer(self, length: int, text: str | None = None, **fields) -> Answer:
        """A reply to a prompt of so many tokens."""
        self.serial += 1
        fields = {"reply_id": f"gen-{self.serial}", "prompt_tokens": length + self.more, "model": "m", **fields}
        return Answer("stop", text=text or f"answer {self.serial}", **fields)

    def ask(self, prompt: str, length: int, answer: Answer, url: str = URL, messages: int = 1) -> str | None:
        failure = self.belonging.problem(url, prompt, self.request(length, messages), answer)
        assert failure is None or (failure.kind, failure.billed) == ("retry", True)
        return failure.reason if failure else None

    def settle(self) -> None:
        for number in range(8):
            assert self.ask(f"p{number}", 10 + number, self.answer(10 + number)) is None


def test_a_reply_that_came_before_is_not_taken_for_another_prompts():
    api = Api()
    first = api.answer(10)
    assert api.ask("p1", 10, first) is None
    assert api.ask("p0", 10, api.answer(10)) is None  # the API has ids of its own
    assert "came again (gen-1)" in api.ask("p2", 10, first)
    assert api.ask("p2", 10, api.answer(10)) is None
    assert api.ask("p1", 10, first) is None  # of a cache, say: the same prompt may have it again
    assert api.ask("p3", 10, first, url="https://other.example/v1") is None


def test_an_api_that_says_the_same_of_every_prompt_is_paid_once_for_each():
    """One id, one text and one count for all: nothing tells whose an answer is, and asking again tells no more."""
    api = Api()
    for number in range(20):
        same = api.answer(10, text="It is 42.", reply_id="x", prompt_tokens=9)
        assert api.ask(f"p{number}", 10 + number, same) is None


def test_an_api_whose_ids_are_always_the_same_is_not_gone_by_them():
    api = Api()
    for number in range(20):
        assert api.ask(f"p{number}", 10, api.answer(10, reply_id="chatcmpl-0")) is None
    assert api.ask("a", 10, api.answer(10, reply_id="")) is None
    assert api.ask("b", 10, api.answer(10, reply_id="")) is None


def test_an_answer_to_another_prompt_shows_by_the_count_of_its_tokens():
    api = Api(more=7)
    api.settle()
    assert "an answer to 47 prompt tokens came, 57 were to be counted" in api.ask("a", 50, api.answer(40))
    assert api.ask("a", 50, api.answer(50)) is None


def test_the_canary_tells_the_count_before_the_first_prompt():
    api = Api()
    api.belonging.expect(URL, api.request(12), api.answer(12))
    assert api.ask("a", 50, api.answer(40)) is not None
    api.belonging.expect(URL, api.request(12), api.answer(40))  # later ones come among other answers
    assert api.ask("a", 50, api.answer(50)) is None


def test_a_prompt_that_is_counted_so_every_time_is_answered_and_costs_two_more():
    api = Api()
    api.settle()
    odd = [api.ask("a", 50, api.answer(50, prompt_tokens=90)) for _ in range(3)]
    assert [reason is None for reason in odd] == [False, False, True]


def test_two_prompts_that_get_each_others_answers_time_and_again_get_none_of_them():
    api = Api()
    api.settle()
    for _ in range(30):
        assert api.ask("a", 50, api.answer(70)) is not None
        assert api.ask("b", 70, api.answer(50)) is not None
    assert api.said == []


def test_an_api_that_counts_in_ways_of_its_own_is_soon_not_gone_by():
    api = Api()
    api.belonging.expect(URL, api.request(12), api.answer(12))
    refused = sum(api.ask(f"q{n}", 50 + n, api.answer(50, prompt_tokens=80 + 2 * n)) is not None for n in range(50))
    assert refused == 9
    assert len(api.said) == 1
    assert api.said[0].startswith(f"warning: {URL} counts prompts in a way of its own")


def test_a_few_prompts_that_are_counted_otherwise_are_soon_not_doubted_any_more():
    api = Api()
    api.belonging.expect(URL, api.request(12), api.answer(12))
    refused = 0
    for number in range(500):
        counted = 53 if number % 20 else 60
        while api.ask(f"q{number}", 50, api.answer(50, prompt_tokens=counted)) is not None:
            refused += 1
    assert refused == 2 * 5


@pytest.mark.parametrize("fields", [{"model": "n"}, {"provider": "Beta"}])
def test_each_model_and_provider_counts_in_its_own_way(fields):
    api = Api()
    api.settle()
    assert api.ask("a", 50, api.answer(50, prompt_tokens=90, **fields)) is None


def test_conversations_are_counted_by_their_length():
    """A template that drops earlier thoughts counts fewer tokens from the second turn on."""
    api = Api()
    api.settle()
    assert api.ask("a", 50, api.answer(50, prompt_tokens=30), messages=3) is None
    assert api.ask("a", 50, api.answer(50, prompt_tokens=None)) is None


@pytest.mark.parametrize("where", ["body", "header"])
def test_a_request_id_that_comes_back_tells_whose_answer_it_is(where):
    """vLLM and some gateways take the id of the header X-Request-Id for their own."""
    hosted = {"kind": "openai", "endpoints": [URL], "served_model": "m"}
    adapter = adapter_for(parse_config({"engine": hosted, "datasets": {"d": {"class": "B", "source": "x"}}}, "test"))
    mine, other = (RequestIds().make(letter * 32, 0) for letter in "ab")
    request = Request(mine, [5, 6], 100, 1, Sampling(), [Message("user", "x")])
    assert adapter.request(request).headers["X-Request-Id"] == mine
    for echoed, well in [(f"chatcmpl-{mine}", True), (f"chatcmpl-{other}", False), ("gen-1", True)]:
        choice = {"finish_reason": "stop", "message": {"content": "Hi."}}
        body = {"id": echoed if where == "body" else "gen-1", "model": "m", "choices": [choice]}
        headers = {"x-request-id": echoed} if where == "header" else {}
        answer = adapter.read(request, Reply(200, headers, orjson.dumps(body)), 0.0)
        assert isinstance(answer, Answer if well else Failure), echoed
