"""How each family's model writes a turn, learned from its template."""

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.target import markers, turn_format
from scripts.lib.target.model import Target, TemplateError
from scripts.lib.target.thoughts import named_as_thought
from tests.families import FAMILIES, published, published_templates, target

WITH_TAGS = [name for name, family in FAMILIES.items() if family.written is not None and name != "gpt-oss"]


@pytest.mark.parametrize(
    ("template", "tags", "form"),
    [
        # The generation prompt ends with the tag, which is ordinary text to Qwen 2.5's tokenizer.
        ("Skywork-Skywork-R1V3-38B", ("<think>", "</think>"), ("\n", "\n", "\n\n")),
        ("LGAI-EXAONE-EXAONE-Deep-7.8B", ("<thought>", "</thought>"), ("\n", "\n", "\n\n")),
        # The template cuts the thought off: `content.split('</reasoning>')[-1]`.
        ("RekaAI-reka-flash-3", ("<reasoning>", "</reasoning>"), ("\n", "\n", "\n\n")),
        # It renders `reasoning_content` between them.
        ("MiniMaxAI-MiniMax-M3-MXFP8", ("<mm:think>", "</mm:think>"), ("", "", "")),
        ("meituan-longcat-LongCat-2.0", ("<longcat_think>", "</longcat_think>"), ("\n", "\n", "\n")),
        ("openbmb-MiniCPM3-4B", ("<|thought_start|>", "<|thought_end|>"), ("\n", "\n", "\n")),
        # Llama-Nemotron's template knows no thoughts: they are part of the content.
        ("nvidia-Llama-3.1-Nemotron-Nano-8B-v1", None, None),
        ("Qwen-Qwen2.5-7B-Instruct", None, None),
    ],
)
def test_tags_that_no_list_knows(template: str, tags: tuple | None, form: tuple | None, tmp_path: Path):
    model = published(template, tmp_path, lacking=("<think>", "</think>"))
    assert (model.think_texts, model.think_open_id) == (tags, None)
    learned = turn_format.of(model)
    if form is None:
        assert not learned.open
    else:
        assert (learned.open, learned.close) == tags
        assert (learned.after_open, learned.before_close, learned.after_close) == form


def test_every_published_template_that_shows_thoughts_is_understood(tmp_path: Path):
    """Of 786, a third tell of thoughts, in nineteen kinds of tags; no header of a turn is taken for one."""
    base = published("Qwen-Qwen2.5-7B-Instruct", tmp_path, lacking=("<think>", "</think>"))
    vocabulary = base._vocabulary
    found: Counter = Counter()
    for source in published_templates().values():
        vocabulary.template = source
        with suppress(TemplateError, UserError):
            found[markers.thought_tags(Target(base.facts, vocabulary))] += 1
    strange = {tags for tags in found if tags and not any(named_as_thought(tag) for tag in tags)}
    assert strange == {("<|channel>", "<channel|>")}
    assert found["<think>", "</think>"] > 200


@pytest.mark.parametrize("name", WITH_TAGS)
def test_thoughts_in_content_are_split_once(name: str):
    model = target(name)
    message = Message("assistant", "<think>\nSimple.\n</think>\n\n4. </think>")
    split = turn_format.of(model).apart(message)
    assert split == Message("assistant", "4. </think>", "Simple.")
    assert turn_format.of(model).apart(split) is split
    user = Message("user", "<think>x</think>")
    assert turn_format.of(model).apart(user) is user
