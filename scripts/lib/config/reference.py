"""The configuration, described: its JSON schema and its reference page, both made from the models."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scripts.lib.config.model import Config


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the configuration, for completion and checks in editors."""
    made = Config.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "drafter-corpus configuration"}


def reference_text(model: type[BaseModel]) -> str:
    """Markdown: one table per section, every key with type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Made from `scripts/lib/config/model.py` by `python -m scripts.describe_config`. Keys marked ⚙ are operational:",
        "changing them never makes a finished result stale.",
    ]
    for path, section, operational in _sections(model, "", False):
        doc = " ".join((section.__doc__ or "").split())
        lines += [
            "",
            f"## {path or 'top level'}",
            "",
            doc,
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for name, field in section.model_fields.items():
            gear = " ⚙" if operational or _is_operational(field) else ""
            cells = [
                f"`{field.alias or name}`{gear}",
                _type(field.annotation),
                _default(field),
                field.description or "",
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _is_operational(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("operational"))


def _sections(model: type[BaseModel], path: str, operational: bool) -> Iterator[tuple[str, type[BaseModel], bool]]:
    yield path, model, operational
    for name, field in model.model_fields.items():
        inner, repeated = _inner_section(field.annotation)
        if inner is not None:
            label = f"{path}.{name}".lstrip(".") + (".*" if repeated else "")
            yield from _sections(inner, label, operational or _is_operational(field))


def _inner_section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section inside an annotation, and whether it is the value of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        inner, _ = _inner_section(argument)
        if inner is not None:
            return inner, getattr(annotation, "__origin__", None) is dict
    return None, False


def _type(annotation: Any) -> str:
    inner, repeated = _inner_section(annotation)
    if inner is not None:
        return "mapping of sections" if repeated else "section"
    text = str(annotation) if get_args(annotation) else getattr(annotation, "__name__", str(annotation))
    return "`" + text.replace("typing.", "").replace("NoneType", "None") + "`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, dict) and any(isinstance(entry, BaseModel) for entry in value.values()):
        value = {key: entry.model_dump(mode="json", exclude_defaults=True) for key, entry in value.items()}
    return "" if value in (None, PydanticUndefined) else f"`{value!r}`"
