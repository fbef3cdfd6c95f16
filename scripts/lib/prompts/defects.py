"""Why a row of a source does not become a prompt: every reason has one name and one meaning.

A row that is read ends as a kept prompt or in exactly one of these, so that the totals add up.
"""

# Found in the row itself. They count against `cleaning.max_reject_rate`.
DEFECTS = {
    "broken_json": "the line is not JSON",
    "broken_row": "the row does not fit the file's columns",
    "row_too_large": "the row is longer than any prompt can be",
    "not_an_object": "the row is neither an object, a list of messages nor a text",
    "unknown_format": "no known columns: name `format` and `fields`",
    "missing_field": "a column that the format needs is missing or empty",
    "bad_messages": "the conversation is not a list of turns",
    "unknown_role": "a turn's role is none of the known ones",
    "unknown_content": "a turn's content is neither text nor text parts",
    "media": "images, audio or video",
    "bad_tool_call": "a tool call that is not JSON",
    "bad_tools": "tool definitions that are not JSON",
    "single_message": "the row is one message of a conversation: join the rows first",
    "transcript": "a text that opens like a transcript, but can't be split into turns",
    "turn_weights": "class A: a turn's weight that no mask can follow",
    "bad_tokens": "input_ids and mask don't fit together",
    "shifted_labels": "labels are shifted against input_ids",
    "no_user_turn": "there is no user turn",
    "assistant_first": "the first turn is not the user's",
    "non_alternating": "turns don't alternate between user and assistant",
    "system_not_first": "a system turn in the middle, or two that differ",
    "empty_turn": "an empty or blank turn",
    "no_final_answer": "class A: the last turn is not an answer",
    "tool_turns": "class B: the conversation calls tools, whose results can't be regenerated",
    "unclosed_reasoning": "class A: a thought that never closes",
    "invalid_unicode": "lone surrogates, or bytes that are not UTF-8",
    "html_residue": "web page markup around a turn",
    "blocked_reply": "an answer that is a rate-limit or error message",
    "control_tokens": "text that contains control tokens of the target's template",
}

# Fit for use, but not wanted.
NOT_USED = {
    "disliked": "class A: an answer that people disliked (KTO)",
    "not_to_learn": "class A: the source says that none of the answers is to be learnt",
    "filtered": "the preset leaves rows of this kind out",
    "template_error": "the target's chat template refuses the messages",
    "prompt_too_long": "no room for an answer in the context",
    "duplicate": "the same prompt is used already in this dataset",
    "duplicate_across": "the same prompt is used in a dataset named before",
    "near_duplicate": "almost the same prompt is used already",
    "contaminated": "matches an evaluation prompt",
    "not_selected": "beyond max_samples",
}

# A row that is kept, but not as it was.
CHANGES = {
    "line_endings": "CR or CRLF became LF",
    "byte_order_mark": "a leading BOM was removed",
    "nul": "NUL characters were removed",
    "control_characters": "control characters were removed",
    "line_separators": "holds U+2028 or U+2029 (kept as they are)",
    "page_residue": "page counters and copy buttons were removed",
    "neutralised": "control tokens were broken up with a zero-width space",
    "answers_cut": "class B: the answers of the source were left out",
    "turn_weights_ignored": "class A: weights of answers that are neither 0 nor 1 count as 1",
    "not_all_learnt": "class A: answers that the source says are not to be learnt stay in the prompt, with mask 0",
    "tool_prompt_cut": "another model's way of calling tools was cut out of the system turn: the tools are given apart",
    "transcript_split": "a transcript inside a text was split into turns",
    "last_answer_cut": "class A: a last answer that is blank or an unclosed thought was cut off, with its question",
    "unanswered_cut": "class A: user turns after the last answer were cut off",
}


class Defect(Exception):
    """A row that can't be used: `reason` is a key of DEFECTS or NOT_USED, `detail` one line for people."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
