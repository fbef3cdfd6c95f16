"""Flags of samples: suspicions that keep a sample, are counted in every shard's summary, and reported."""

# In the order in which an answer gets them.
FLAGS = {
    "usage_mismatch": "the server's own token counts differ from ours",
    "short_of_max_tokens": "cut by the server before max_tokens: it has less room than we think",
    "stopped_early": "cut by the server before max_tokens, at its first tokens or later",
    "ids_after_stop": "what the engine wrote after the stop token was cut off",
    "answer_in_reasoning": "a hosted API returned a thought and no answer",
    "eos_appended": "the engine withheld the stop token that it named; it was added",
    "length_mismatch": "reconstructed: the API counted another number of tokens than the ids made from its text",
    "replacement_character": "reconstructed: the text holds U+FFFD, so bytes are lost",
    "outer_blanks": "reconstructed: thought or answer begins or ends with blanks, where servers strip",
    "repeating_tail": "the answer ends in a loop that the model left by itself",
    "truncated": "the answer reached max_tokens (dataset setting `truncation`)",
    "reasoning_only": "a thought and no answer (dataset setting `reasoning_only`)",
    "thought_in_text": "an answer begins with what looks like a thought and is none to target and template: it stays text",
    "empty_thought": "a ready conversation has no thought where the template opens one: an empty one was written",
    "reasoning_dropped": "a ready conversation has a thought that the target has no place for: it was left out",
    "template_error": "the chat template refuses the conversation; the gate of this name rejects it",
}
