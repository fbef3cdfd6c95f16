"""A prompt's way to its outcome: turns, truncation, other seeds, failures. Pure rules on real templates."""

import random

import pytest

from scripts.lib.client.attempts import backoff
from scripts.lib.client.backlog import Work
from scripts.lib.completions.dialogue import RESAMPLES, Dialogue, Step, history, seed_of
from scripts.lib.config.file import parse_config
from scripts.lib.config.model import Sampling, Transport
from scripts.lib.core.records import Message, Prompt, Turn
from scripts.lib.engines.base import Answer, Failure, Request
from scripts.lib.target.output import add_text
from tests import families

KIMI = families.target("kimi-k2.5")
STOP = next(iter(KIMI.eos_ids & {163586}))
ATTEMPTS = 3


def rules(target=KIMI, max_tokens=100, **dataset) -> Dialogue:
    values = {
        "model": {"name": "org/base"},
        "engine": {"kind": "sglang", "served_model": "tuned"},
        "sampling": {"seed": 5},
        "datasets": {"d": {"class": "B", "source": "x", **dataset}},
    }
    return Dialogue(target, "d", parse_config(values, "test"), max_tokens)


def failed(dialogue: Dialogue, one: Work, failure: Failure, successes: int) -> Step:
    """What follows when a prompt's attempts meet a failure."""
    settings = Transport(attempts=ATTEMPTS, backoff_first=1.0, backoff_cap=8.0)
    return dialogue.tried(one, one.attempts.failed(failure, successes, settings, random.Random(0)))


def work(*users: str, tools: str | None = None) -> Work:
    messages = [Message("user", text) for text in users or ("Why do you count?",)]
    return Work(Prompt("a" * 32, "d", "x:1", "k", messages, tools))


def said(text: str, finish="stop", target=KIMI) -> Answer:
    """An engine's answer of this text; Kimi's prompts open the thought."""
    ids = target.encode(text)
    return Answer(finish, output_ids=[*ids, STOP] if finish == "stop" else ids)


def take(dialogue: Dialogue, one: Work, answer: Answer) -> Step:
    request = dialogue.next_request(one)
    assert isinstance(request, Request)
    step = dialogue.answered(one, request, answer, "http://u0", 1.5)
    assert isinstance(step, Step)
    return step


def text_of(turn: Turn) -> tuple[str, str | None]:
    """(content, thought) as the finished shard will have them."""
    add_text(KIMI, turn)
    return turn.content, turn.reasoning


def test_a_single_turn():
    dialogue, one = rules(), work()
    request = dialogue.next_request(one)
    assert request.prompt_ids == KIMI.render(one.prompt.messages)
    assert request.max_tokens == 100
    assert request.seed == seed_of(5, "a" * 32, 0, 0)
    assert STOP in request.stop_ids
    answer = said("Hm.</think>Because.")
    step = dialogue.answered(one, request, answer, "http://u0", 1.5)
    turn = step.completion.turns[0]
    assert (step.completion.outcome, text_of(turn)) == ("ok", ("Because.", "Hm."))
    assert turn.output_ids == answer.output_ids
    assert (turn.endpoint, turn.seconds, turn.seed, turn.ids_origin) == ("http://u0", 1.5, request.seed, "engine")


def test_turns_are_answered_in_order_each_on_the_history_that_the_template_renders():
    dialogue, one = rules(), work("First?", "Second?", "Third?")
    for number, text in enumerate(["One.", "Two."]):
        step = take(dialogue, one, said(f"Hm.</think>{text}"))
        assert step.kind == "turn"
        assert step.turn is one.turns[number]
    messages = [
        Message("user", "First?"),
        Message("assistant", "One.", "Hm."),
        Message("user", "Second?"),
        Message("assistant", "Two.", "Hm."),
        Message("user", "Third?"),
    ]
    request = dialogue.next_request(one)
    assert request.messages == messages
    assert request.prompt_ids == KIMI.render(messages)
    step = take(dialogue, one, said("Hm.</think>Three."))
    assert step.kind == "done"
    assert [text_of(turn) for turn in step.completion.turns] == [("One.", "Hm."), ("Two.", "Hm."), ("Three.", "Hm.")]
    assert step.completion.attempts == 1


def test_a_resumed_conversation_goes_on_where_it_was():
    dialogue, first = rules(), work("First?", "Second?")
    take(dialogue, first, said("Hm.</think>One."))
    resumed = Work(first.prompt, list(first.turns))
    assert rules().next_request(resumed).prompt_ids == dialogue.next_request(first).prompt_ids


def test_a_later_turn_that_fails_keeps_the_earlier_ones():
    dialogue, one = rules(), work("First?", "Second?")
    take(dialogue, one, said("Hm.</think>One."))
    step = take(dialogue, one, said("</think>" + "no " * 60, finish="length"))
    assert step.completion.outcome == "repetition"
    assert [turn.content for turn in step.completion.turns] == ["One."]


def test_a_truncated_turn_ends_the_conversation():
    dialogue, one = rules(), work("First?", "Second?")
    step = take(dialogue, one, said("Hm.</think>One and", finish="length"))
    assert step.completion.outcome == "length"
    assert step.completion.turns[0].flags[-1] == "truncated"
    assert step.completion.turns[0].finish_reason == "length"


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_truncated_answers_are_kept_with_their_flag(policy):
    step = take(rules(truncation=policy), work(), said("Hm.</think>One and", finish="length"))
    assert (step.kind, step.completion.outcome) == ("done", "length")


def test_continue_asks_for_the_rest_by_ids():
    dialogue, one = rules(max_tokens=8, truncation="continue", truncation_max_tokens=50), work()
    part = said("Hm.</think>One and", finish="length")
    prompt_ids = dialogue.next_request(one).prompt_ids
    step = take(dialogue, one, part)
    assert step.kind == "part"
    request = dialogue.next_request(one)
    assert request.prompt_ids == prompt_ids + part.output_ids
    assert request.max_tokens == 50 - len(part.output_ids)
    assert request.seed != seed_of(5, "a" * 32, 0, 0)
    rest = [*KIMI.encode(" two."), STOP]
    step = dialogue.answered(one, request, Answer("stop", output_ids=rest), "http://u1", 1.0)
    turn = step.completion.turns[0]
    assert step.completion.outcome == "ok"
    assert turn.prompt_ids == prompt_ids
    assert turn.output_ids == part.output_ids + rest
    assert (text_of(turn), turn.seconds) == (("One and two.", "Hm."), 2.5)


def test_a_continued_thought_stays_a_thought():
    dialogue, one = rules(max_tokens=8, truncation="continue", truncation_max_tokens=50), work()
    assert take(dialogue, one, said("Hm, that is", finish="length")).kind == "part"
    step = take(dialogue, one, said(" not so", finish="length"))
    assert step.completion.outcome == "reasoning_only"
    assert text_of(step.completion.turns[0]) == ("", "Hm, that is not so")


def test_continue_goes_on_after_a_restart():
    dialogue, one = rules(max_tokens=8, truncation="continue", truncation_max_tokens=50), work()
    step = take(dialogue, one, said("Hm.</think>One and", finish="length"))
    resumed = Work(one.prompt, [], step.turn)
    assert dialogue.next_request(resumed).prompt_ids == dialogue.next_request(one).prompt_ids


def test_retry_asks_once_more_with_more_room():
    dialogue, one = rules(max_tokens=8, truncation="retry", truncation_max_tokens=50), work()
    assert take(dialogue, one, said("Hm.</think>One and", finish="length")).kind == "part"
    request = dialogue.next_request(one)
    assert request.max_tokens == 50
    assert request.prompt_ids == KIMI.render(one.prompt.messages)
    step = take(dialogue, one, said("Hm.</think>One and two and", finish="length"))
    assert (step.kind, step.completion.outcome) == ("done", "length")
    assert text_of(step.completion.turns[0]) == ("One and two and", "Hm.")


TOO_LONG = Failure("permanent", "HTTP 400: Requested token count exceeds", outcome="prompt_too_long")


@pytest.mark.parametrize("policy", ["continue", "retry"])
@pytest.mark.parametrize(
    ("failure", "why"),
    [(TOO_LONG, "Requested token count"), (Failure("permanent", "HTTP 400: no"), "no"), (None, "the context holds")],
)
@pytest.mark.parametrize(("text", "outcome"), [("Hm.</think>One and", "length"), ("Hm, that is", "reasoning_only")])
def test_what_was_answered_is_kept_when_there_can_be_no_more(policy, failure, why, text, outcome):
    """It is paid, and as good as any answer that reached max_tokens."""
    dialogue, one = rules(max_tokens=8, truncation=policy, truncation_max_tokens=50), work()
    part = said(text, finish="length")
    take(dialogue, one, part)
    if failure is None:
        dialogue.context_length = len(one.prompt_ids)
        step = dialogue.next_request(one)
    else:
        step = failed(dialogue, one, failure, 1)
    assert (step.kind, step.completion.outcome) == ("done", outcome)
    assert why in step.completion.reason
    (turn,) = step.completion.turns
    assert turn.output_ids == part.output_ids
    assert "truncated" in turn.flags


def test_exhausted_attempts_at_the_rest_keep_the_part():
    dialogue, one = rules(max_tokens=8, truncation="continue", truncation_max_tokens=50), work()
    take(dialogue, one, said("Hm.</think>One and", finish="length"))
    steps = [failed(dialogue, one, Failure("retry", "HTTP 500"), number) for number in range(ATTEMPTS)]
    assert [step.kind for step in steps] == ["again"] * (ATTEMPTS - 1) + ["done"]
    assert steps[-1].completion.outcome == "length"
    assert "HTTP 500" in steps[-1].completion.reason


def test_a_request_that_fills_the_context_is_asked_once_with_less():
    """Speculating engines keep some tokens for drafts and refuse it, whatever they say their context is."""
    dialogue, one = rules(max_tokens=100), work()
    length = len(KIMI.render(one.prompt.messages))
    dialogue.context_length = length + 90
    assert dialogue.next_request(one).max_tokens == 90
    assert failed(dialogue, one, TOO_LONG, 1).kind == "again"
    assert dialogue.next_request(one).max_tokens == 90 - 64
    step = failed(dialogue, one, TOO_LONG, 2)
    assert (step.kind, step.completion.outcome) == ("done", "prompt_too_long")


def test_a_request_with_room_to_spare_is_not_asked_with_less():
    dialogue, one = rules(max_tokens=100), work()
    dialogue.context_length = len(KIMI.render(one.prompt.messages)) + 1000
    assert dialogue.next_request(one).max_tokens == 100
    assert failed(dialogue, one, TOO_LONG, 1).completion.outcome == "prompt_too_long"


def test_a_loop_is_not_given_more_room():
    dialogue, one = rules(max_tokens=8, truncation="continue", truncation_max_tokens=500), work()
    step = take(dialogue, one, said("</think>" + "no " * 60, finish="length"))
    assert (step.kind, step.completion.outcome, step.completion.turns) == ("done", "repetition", [])


def test_no_more_room_than_the_context_has():
    dialogue, one = rules(max_tokens=100, truncation="retry", truncation_max_tokens=200), work()
    length = len(KIMI.render(one.prompt.messages))
    dialogue.context_length = length + 60
    assert dialogue.next_request(one).max_tokens == 60
    step = take(dialogue, one, said("</think>" + "x y z " * 2, finish="length"))
    assert step.kind == "part"
    dialogue.context_length = length + 1
    one = work()
    assert dialogue.next_request(one).max_tokens == 1
    dialogue.context_length = length
    step = dialogue.next_request(one)
    assert step.completion.outcome == "prompt_too_long"
    assert str(length) in step.completion.reason


def test_an_empty_answer_is_asked_again_with_other_seeds_then_given_up():
    dialogue, one = rules(), work()
    seeds = []
    for _ in range(RESAMPLES):
        seeds.append(dialogue.next_request(one).seed)
        assert take(dialogue, one, Answer("stop", output_ids=[STOP])).kind == "again"
    seeds.append(dialogue.next_request(one).seed)
    step = take(dialogue, one, Answer("stop", output_ids=[STOP]))
    assert (step.completion.outcome, step.completion.attempts) == ("empty", RESAMPLES + 1)
    assert step.completion.turns == []
    assert len(set(seeds)) == RESAMPLES + 1


def test_a_template_that_refuses_ends_the_prompt():
    gemma = families.target("gemma-3")
    one = Work(Prompt("a" * 32, "d", "x:1", "k", [Message("user", "a"), Message("tool", "b"), Message("user", "c")]))
    dialogue = rules(gemma)
    step = dialogue.next_request(one)
    if isinstance(step, Request):  # the refusal comes at the turn that the role spoils
        step = take(dialogue, one, Answer("stop", output_ids=[*gemma.encode("x"), max(gemma.eos_ids)]))
        step = dialogue.next_request(one)
    assert step.completion.outcome == "template_error"
    assert step.completion.reason


def test_the_matched_stop_token_is_added_where_the_engine_withheld_it():
    answer = said("Hm.</think>Because.")
    answer.output_ids.pop()
    answer.matched_stop = STOP
    turn = take(rules(), work(), answer).completion.turns[0]
    assert turn.output_ids[-1] == STOP
    assert turn.eos_appended


def test_a_matched_id_that_ends_no_turn_of_the_target_is_not_doubled():
    """The engine knows more ends of a turn than the tokenizer's folder tells. Validation refuses the sample."""
    answer = said("Hm.</think>Because.")
    answer.output_ids[-1] = answer.matched_stop = other = KIMI.encode("x")[0]
    turn = take(rules(), work(), answer).completion.turns[0]
    assert turn.output_ids[-1] == other
    assert turn.output_ids[-2] != other
    assert not turn.eos_appended


@pytest.mark.parametrize(
    ("ids", "matched", "kind", "says"),
    [
        ([*KIMI.encode("Because.")], None, "retry", "without a stop token"),
        ([163840, STOP], None, "fatal", "outside the target's"),
        ([*KIMI.encode("Because.")], 163840, "fatal", "outside the target's"),
    ],
)
def test_answers_that_are_none(ids, matched, kind, says):
    dialogue, one = rules(), work()
    request = dialogue.next_request(one)
    failure = dialogue.answered(one, request, Answer("stop", output_ids=ids, matched_stop=matched), "u", 1.0)
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert says in failure.reason


def test_text_without_ids_is_reconstructed_and_labelled():
    dialogue, one = rules(), work()
    answer = Answer("stop", text="Because.", reasoning="Hm.", output_tokens=7, cost_usd=0.25)
    turn = take(dialogue, one, answer).completion.turns[0]
    assert turn.output_ids == [*KIMI.encode("Hm.</think>Because."), STOP]
    assert (turn.ids_origin, turn.cost_usd) == ("reconstructed", 0.25)
    assert (turn.content, turn.reasoning) == ("Because.", "Hm.")


# --- failures ---


def test_attempts_are_used_up_only_between_successes():
    """A server that fails everything burns through no prompt; a prompt that fails among successes ends."""
    dialogue, one = rules(), work()
    failure = Failure("retry", "HTTP 500")
    for _ in range(50):
        assert failed(dialogue, one, failure, successes=7).kind == "again"
    assert one.attempts.counted == 1
    assert failed(dialogue, one, failure, successes=8).kind == "again"
    step = failed(dialogue, one, failure, successes=9)
    assert step.completion.outcome == "exhausted"
    assert step.completion.reason == f"{ATTEMPTS} attempts, the last: HTTP 500"


@pytest.mark.parametrize("kind", ["throttle", "wait"])
def test_saturated_and_missing_servers_cost_no_attempt(kind):
    dialogue, one = rules(), work()
    assert all(failed(dialogue, one, Failure(kind, "x"), n).kind == "again" for n in range(50))
    assert one.attempts.counted == 0


def test_a_stale_connection_costs_nothing_but_not_for_ever():
    dialogue, one = rules(), work()
    delays = [failed(dialogue, one, Failure("free", "closed"), n).delay for n in range(3)]
    assert delays == [0.0] * 3
    assert one.attempts.counted == 0
    assert failed(dialogue, one, Failure("throttle", "429"), 3).kind == "again"
    for n in range(3, 3 + ATTEMPTS):
        step = failed(dialogue, one, Failure("free", "closed"), n)
    assert step.completion.outcome == "exhausted"


def test_a_permanent_failure_has_its_own_outcome():
    step = failed(rules(), work(), Failure("permanent", "HTTP 400: too long", outcome="prompt_too_long"), 1)
    assert (step.completion.outcome, step.completion.reason) == ("prompt_too_long", "HTTP 400: too long")


def test_backoff_grows_with_full_jitter_up_to_its_cap():
    dice = random.Random(1)
    for pauses, most in enumerate([1, 2, 4, 8, 8, 8]):
        waits = [backoff(pauses, 1.0, 8.0, dice) for _ in range(400)]
        assert all(0 <= wait <= most for wait in waits)
        assert min(waits) < 0.05 * most
        assert max(waits) > 0.95 * most


def test_the_servers_own_word_on_the_pause_is_kept():
    dialogue, one = rules(), work()
    assert failed(dialogue, one, Failure("throttle", "429", retry_after=30.0), 1).delay == 30.0


def test_seeds_differ_by_prompt_turn_and_repetition_and_fit_every_engine():
    seeds = {
        seed_of(s, prompt_id, turn, again) for s in (0, 1) for prompt_id in "ab" for turn in (0, 1) for again in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(0, "a", 0, 0) == seed_of(0, "a", 0, 0)


def test_history_stops_at_the_next_question():
    messages = [Message("system", "s"), Message("user", "1"), Message("user", "2")]
    assert history(messages, []) == messages[:2]
    turn = Turn([], [], "stop", "x", "r")
    assert history(messages, [turn]) == [*messages[:2], Message("assistant", "x", "r"), messages[2]]


@pytest.mark.parametrize(
    ("family", "reasoning", "refused"),
    [
        ("kimi-k2.5-instant", "Hm.", True),
        ("kimi-k2.5-instant", " ", False),
        ("kimi-k2.5-instant", None, False),
        ("kimi-k2.5", "Hm.", False),
        ("qwen3-no-think", "Hm.", True),
        ("qwen3", "Hm.", False),
        ("deepseek-v3.1-no-think", "Hm.", True),
        ("deepseek-r1-distill", "Hm.", False),
        ("glm-4.5", "Hm.", False),
        ("gpt-oss", "Hm.", False),
        ("llama-3.1", "Hm.", False),  # its template knows no thoughts, so none is turned off
    ],
)
def test_a_thought_without_a_place_is_refused(family, reasoning, refused):
    target = families.target(family)
    dialogue, one = rules(target), work()
    request = dialogue.next_request(one)
    answer = Answer("stop", text="Four.", reasoning=reasoning, output_tokens=9)
    step = dialogue.answered(one, request, answer, "http://u0", 1.0)
    assert isinstance(step, Failure) == refused
    if refused:
        assert (step.kind, step.billed) == ("permanent", True)
        assert "engine.extra_body" in step.reason


def test_no_seed_is_sent_when_there_is_to_be_none():
    dialogue, one = rules(), work()
    dialogue.sampling = Sampling(seed=None)
    request = dialogue.next_request(one)
    assert request.seed is None
    assert take(dialogue, one, said("Hm.</think>Four.")).completion.turns[0].seed == 0


def test_a_turn_knows_its_engine_its_model_and_what_it_used_of_a_budget():
    """As the endpoint counts: a hosted API's tokens are not ours. A part that is continued counts as well."""
    dialogue, one = rules(truncation="continue", truncation_max_tokens=300), work()
    request = dialogue.next_request(one)
    answer = said("I count because", "length")
    answer.prompt_tokens, answer.output_tokens = 70, 20
    step = dialogue.answered(one, request, answer, "http://e", 1.0)
    assert (step.turn.engine, step.turn.served_model) == ("sglang", "tuned")
    assert step.turn.billed_tokens == 70 + len(answer.output_ids)
    request = dialogue.next_request(one)
    rest = said(" it is fun.")
    step = dialogue.answered(one, request, rest, "http://e", 1.0)
    (turn,) = step.completion.turns
    assert turn.billed_tokens == 70 + len(answer.output_ids) + len(request.prompt_ids) + len(rest.output_ids)


@pytest.mark.parametrize(
    ("answer", "flagged"),
    [
        (Answer("stop", text="Four.", reasoning="Hm."), True),
        (Answer("stop", text="Four.", reasoning_tokens=9), True),
        (Answer("stop", text="Four.", reasoning_tokens=0), False),
        (Answer("stop", text="Four."), False),
    ],
)
def test_a_thought_that_the_template_has_no_place_for_is_flagged(answer, flagged):
    step = take(rules(families.target("llama-3.1")), work(), answer)
    (turn,) = step.completion.turns
    assert (step.completion.outcome, "reasoning_dropped" in turn.flags) == ("ok", flagged)


@pytest.mark.parametrize("family", ["kimi-k2.5", "kimi-k2.5-instant"])
@pytest.mark.parametrize(
    ("reasoning", "tokens", "refused"), [(None, 55, True), (" ", 55, True), (None, 0, False), (None, None, False)]
)
def test_an_answer_whose_thought_is_hidden_is_refused(family, reasoning, tokens, refused):
    """Its ids would say that there was none."""
    dialogue, one = rules(families.target(family)), work()
    answer = Answer("stop", text="Four.", reasoning=reasoning, reasoning_tokens=tokens)
    step = dialogue.answered(one, dialogue.next_request(one), answer, "http://u0", 1.0)
    assert isinstance(step, Failure) == refused
    assert not refused or "55 tokens of a thought that it doesn't show" in step.reason
