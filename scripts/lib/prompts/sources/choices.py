"""What a question of multiple choice offers, as lines of text: MMLU, ARC, MedQA and the like each have a shape of their own."""

import re
from typing import Any

from scripts.lib.core.exact_json import NotJson
from scripts.lib.prompts.sources.literals import read_literal

_LABEL = re.compile(r"\s*\(?[A-Za-z0-9]{1,2}\s?[.):]")
_KEYS = ("label", "key", "letter", "option", "id")
_TEXTS = ("text", "content", "value", "choice")


def choices_text(value: Any) -> str | None:
    """The choices, a line each with its label; None for what is no list of choices.

    A text as it is; texts, which get letters unless they bring labels; `{text: [...], label: [...]}`;
    `{A: ..., B: ...}`; objects of label and text.
    """
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, dict):
        return _of_dict(value)
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(one, str) for one in value):
        if all(_LABEL.match(one) for one in value):
            return "\n".join(one.strip() for one in value)
        return _lines([chr(ord("A") + number) for number in range(len(value))], value) if len(value) <= 26 else None
    if all(isinstance(one, dict) for one in value):
        labels = [next((one[key] for key in _KEYS if isinstance(one.get(key), str)), None) for one in value]
        texts = [next((one[key] for key in _TEXTS if isinstance(one.get(key), str)), None) for one in value]
        return _lines(labels, texts)
    return None


def _of_text(text: str) -> str | None:
    """A text as it is, but for a list that a table holds as text."""
    if text.lstrip().startswith(("[", "{")):
        try:
            found = read_literal(text)
        except NotJson:
            return text
        return (None if isinstance(found, str) else choices_text(found)) or text
    return text if text.strip() else None


def _of_dict(value: dict) -> str | None:
    if isinstance(value.get("text"), list) and isinstance(value.get("label"), list):
        return _lines(value["label"], value["text"])
    given = {key: text for key, text in value.items() if text is not None}  # a struct of Arrow has all keys
    if given and all(isinstance(key, str) and re.fullmatch(r"[A-Z]|\d", key) for key in given):
        return _lines(list(given), list(given.values()))
    return None


def _lines(labels: list, texts: list) -> str | None:
    if len(labels) != len(texts) or not all(isinstance(one, str) for one in [*labels, *texts]):
        return None
    return "\n".join(f"{label}. {text}" for label, text in zip(labels, texts))
