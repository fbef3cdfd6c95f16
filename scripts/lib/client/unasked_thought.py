"""Thoughts of hosted APIs that no sample can hold: hidden ones, and where the target's own template leaves none a place."""

from collections.abc import Sequence

from scripts.lib.engines.base import Answer
from scripts.lib.target import turn_format
from scripts.lib.target.model import Target


def unasked_thought(target: Target, prompt_ids: Sequence[int], answer: Answer) -> str | None:
    """Why an answer is none of the target as it is set, which doesn't think here; None when it is.

    What was sampled is the answer after a thought: without it, in ids that say that there was none, it would teach
    something else.
    """
    if answer.output_ids is not None or not turn_format.knows_thoughts(target):
        return None
    if not (answer.reasoning or "").strip():
        close = turn_format.of(target).close
        if not answer.reasoning_tokens or (close and close in (answer.text or "")):
            return None
        return (
            f"the API counts {answer.reasoning_tokens} tokens of a thought that it doesn't show, without which the answer can't "
            "be learnt: have it shown, or turned off, by engine.extra_body"
        )
    if not turn_format.thinking_is_off(target, prompt_ids):
        return None
    return (
        "the API thinks, the target's template is set not to: turn it off by engine.extra_body (OpenRouter: {reasoning: "
        "{enabled: false}}, vLLM and SGLang: {chat_template_kwargs: {enable_thinking: false}}), or on in "
        "model.chat_template_kwargs"
    )
