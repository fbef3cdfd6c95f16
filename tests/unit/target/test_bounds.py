"""Templates that would run for ever or fill the memory end with one line; honest ones never notice."""

from pathlib import Path

import pytest

from scripts.lib.core.errors import UserError
from scripts.lib.core.records import Message
from scripts.lib.target import bounds
from scripts.lib.target.chat_template import compile_template
from scripts.lib.target.prepare import prepare_target
from tests.families import FAMILIES, build, config_of

ENDLESS = {
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "three short loops": "{% for i in range(999) %}{% for j in range(999) %}{% for k in range(999) %}x{% endfor %}{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro m() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{% set x = m() %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros that call themselves": "{% macro m(n) %}{% for i in range(9) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
    "a loop with a condition": "{% for i in range(99999) if i % 2 %}{% for j in range(99999) if j %}{% endfor %}{% endfor %}",
    "a condition that is never met": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "rounds that take long": "{% for i in range(99999) %}{% for j in range(999) %}{% set x = range(99999) | sum %}"
    "{% endfor %}{% endfor %}",
    "a number": "{{ 9**(9**(9**9)) }}",
    "a number that squares itself": "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "placeholder text": "{{ lipsum(n=10**9) }}",
}
EXPLODING = {
    "a product": "{{ 'a' * 10**11 }}",
    "a product the other way": "{{ 10**11 * 'ab' }}",
    "a list": "{{ ([0] * 10**11) | length }}",
    "text that doubles": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "text that doubles by joining": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a text that is centred": "{{ 'a' | center(10**11) }}",
    "a text that is padded": "{{ 'a'.ljust(10**11) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "replacements": "{% set s = 'a' * 99999 %}{{ s | replace('a', s) | replace('a', s) }}",
    "a range": "{{ range(10**11) | list }}",
    "nested blocks": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
}
CASES = ENDLESS | EXPLODING


@pytest.mark.parametrize("template", CASES.values(), ids=CASES)
def test_such_a_template_ends_with_one_line(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "MOST_SECONDS", 2)
    family = FAMILIES["llama-3.1"]
    path = tmp_path / "a.jinja"
    path.write_text(template + "{{ messages[0].content }}")
    config = config_of(build(family, tmp_path / "model"), chat_template=str(path))
    with pytest.raises(UserError, match="its chat template fails on a plain conversation: .+") as caught:
        prepare_target(config, tmp_path / "target")
    assert "\n" not in str(caught.value)


def test_rounds_are_counted_for_each_rendering(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "MOST_ROUNDS", 100)
    render = compile_template("{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}", {})
    monkeypatch.setattr(bounds, "ROUNDS_PER_PAIR", 0)
    messages = [Message("user", "x").for_template()] * 60
    assert [render(messages, None, False) for _ in range(3)] == ["x" * 60] * 3
    assert render([], None, False) == "none"
    with pytest.raises(bounds.TemplateRuntimeError, match="does not end: more than 100 rounds"):
        render(messages * 2, None, False)


def test_a_template_that_looks_through_all_earlier_messages_for_each():
    """Honest, and quadratic: 4,000 messages are 16 million rounds."""
    source = "{% for m in messages %}{% for k in messages %}{% endfor %}{% endfor %}done"
    assert compile_template(source, {})([Message("user", "x").for_template()] * 4000, None, False) == "done"


def test_what_is_inserted_changes_nothing():
    source = """{%- for i in range(3) -%}
        {%- set x = i * 2 -%}{%- set y, z = 1, 2 -%}
        {%- if loop.last %} last {{ loop.length }}{% else %} {{ x }},{{ loop.nextitem }}{% endif -%}
    {%- endfor -%} {% set t %}block{% endset %}{{ t }}{{ 2 ** 10 }}{{ "ab" * 2 }}{{ [1] * 2 }}{{ 1.5 * 2 }}"""
    assert compile_template(source, {})([], None, False) == " 0,1 2,2 last 3block1024abab[1, 1]3.0"
