"""What published templates read of messages and calls is what ingestion keeps."""

from collections.abc import Mapping

import pytest

from scripts.lib.core.records import Message
from scripts.lib.target.chat_template import template_message, with_arguments
from scripts.lib.target.template_fields import fields_read
from tests.families import published_templates

CALLS = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]'

# Read by some template, and not kept, with the reason. Whatever is not here and not kept fails the test.
LEFT_OUT = {
    # Other names of what is kept; the templates read ours too.
    "message": {
        "from": "ShareGPT's `role`; sources are brought to ours",
        "value": "ShareGPT's `content`",
        "tool_call": "one call, where `tool_calls` is not there",
        "function_call": "GigaChat's one call, where `tool_calls` is not there",
        "function_calls": "Olmo's calls as text, where `tool_calls` is not there",
        "functions": "Olmo's definitions as text, where `tools` are not given",
        "function_descriptions": "GigaChat's definitions, where `tools` are not given",
        "tools": "definitions inside the system turn, where `tools` are not given",
        "tool_responses": "Gemma's results on the turn that calls; turns of tools are read too",
        "tool_results": "results on the turn that calls; turns of tools are read too",
        "metadata": "GLM-4's call without `tool_calls`: a call is refused as having no place there",
        # What a dataset's own program fills in, and no conversation has.
        "chosen": "preference data of Apriel's training",
        "align_argument_order_to_description": "a switch of GigaChat's training",
        "current_date": "MiniMax's server fills it in",
        "current_location": "MiniMax's server fills it in",
        "citations": "documents are not kept: retrieval is no conversation",
        "references": "documents are not kept",
        "title": "Genstruct makes questions of articles: no conversation",
        "task": "a switch of DeepSeek-V4's for its own tasks",
        "response_format": "a JSON schema of DeepSeek-V4's system turn: not kept",
        "wo_eos": "a switch of DeepSeek-V4's training",
        "prefix": "an answer that is begun and not finished: conversations are whole",
        # Files and media: rows with them are left out by reason (`media`).
        "files": "media",
        "embed_files": "media",
        "file_placeholders": "media",
        "content_blocks": "media",
        "image": "media",
        "image_url": "media",
        "video": "media",
        "text": "a part of a content: contents are texts here",
        "type": "a part of a content: contents are texts here",
    },
    "call": {
        "content_type": "gpt-oss prints `json` where there is none, which is what calls are",
        "parameters": "EXAONE's other name of `arguments`, read where those are not there",
        # A name of the template that stands for messages elsewhere.
        "role": "of a message",
        "content": "of a message",
        "reasoning_content": "of a message",
        "tool_call_id": "of a message",
        # Calls without `function` around them.
        "name": "of the function",
        "arguments": "of the function",
    },
    "function": {
        "content_type": "as of a call",
        "parameters": "as of a call",
        "id": "of the call",
        "type": "of the call",
        "function": "a call that is named like its function",
    },
}


def kept() -> Mapping[str, set[str]]:
    """What arrives at a template of turns that say all they can."""
    turns = [
        Message("assistant", "Let me see.", "Hm.", CALLS),
        Message("tool", "7", name="f", tool_call_id="c1"),
    ]
    (called, result) = with_arguments([template_message(turn) for turn in turns], as_text=False)
    (call,) = called["tool_calls"]
    # The renderer adds the names under which transformers gives a thought.
    return {"message": {*called, *result, "thinking"}, "call": set(call), "function": set(call["function"])}


def test_every_field_that_a_published_template_reads_is_kept():
    read: dict[str, set[str]] = {thing: set() for thing in LEFT_OUT}
    for source in published_templates().values():
        for thing, names in fields_read(source).items():
            read[thing] |= names
    for thing, names in read.items():
        assert names - kept()[thing] - LEFT_OUT[thing].keys() == set(), f"a {thing} has these in some template"
        assert LEFT_OUT[thing].keys() <= names - kept()[thing], "an excuse that no template needs"


@pytest.mark.parametrize(
    ("template", "message", "call", "function"),
    [
        ("{% for m in messages %}{{ m.a }}{{ m['b'] }}{{ m.get('c') }}{% endfor %}", "abc", "", ""),
        ("{{ messages[0].a }}{{ messages[1:][0].b }}{{ (messages | last).c }}", "abc", "", ""),
        ("{% if 'a' in messages[0] %}{% endif %}{% set x = messages[0] %}{{ x.b }}", "ab", "", ""),
        ("{% set ns = namespace(m=none) %}{% set ns.m = messages[0] %}{{ ns.m.a }}", "a", "", ""),
        ("{% macro show(m, n) %}{{ m.a }}{{ n.b }}{% endmacro %}{{ show(messages[0], n=messages[1]) }}", "ab", "", ""),
        ("{% for m in messages if m.a == 'x' %}{{ loop.previtem.b }}{% endfor %}", "ab", "", ""),
        ("{% for m in messages | selectattr('a') | list %}{{ (m if true else none).b }}{% endfor %}", "ab", "", ""),
        ("{{ other.a }}{{ tools[0].b }}{{ messages | length }}", "", "", ""),
        (
            "{% for c in messages[0].tool_calls %}{% set c = c.function or c %}{{ c.a }}{{ c['id'] }}{% endfor %}",
            ["tool_calls"],
            ["function", "a", "id"],
            ["function", "a", "id"],
        ),
        ("{{ messages[0]['tool_calls'][0]['function']['a'] }}", ["tool_calls"], ["function"], "a"),
    ],
)
def test_reads_are_found_however_they_are_written(template: str, message: str, call: str, function: str):
    assert fields_read(template) == {"message": set(message), "call": set(call), "function": set(function)}
