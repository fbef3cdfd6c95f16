"""Reads and checks configuration files: every mistake in one line, with its key."""

from pathlib import Path
from typing import Any

import orjson
import yaml
from pydantic import BaseModel, ValidationError

from scripts.lib.config.model import Config
from scripts.lib.core.errors import UserError


def parse_config(values: dict[str, Any], origin: str) -> Config:
    """Check plain values. Raises UserError with one line that names every bad key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                text = f"unknown key `{where}`{_suggestion(problem['loc'])}"
            elif problem["type"] == "missing":
                text = f"key `{where}` is missing"
            else:
                message = problem["msg"].removeprefix("Value error, ")
                text = f"{where}: {message}" if where else message
                if problem["type"] not in ("value_error",):
                    text += f" (got {problem['input']!r})"
            problems.append(text)
        raise UserError(f"{origin}: " + "; ".join(problems)) from None


def _suggestion(location: tuple) -> str:
    """`, did you mean ...?` for a misspelt key, from the section that it stands in."""
    import difflib

    section: Any = Config
    for part in location[:-1]:
        fields = getattr(section, "model_fields", {})
        known = {f.alias or name: f for name, f in fields.items()} | fields
        if part not in known:
            continue  # a key of a mapping (dataset or lane name): its value's section comes next
        section = _section_of(known[part].annotation)
    fields = getattr(section, "model_fields", {})
    close = difflib.get_close_matches(str(location[-1]), [f.alias or name for name, f in fields.items()], n=1)
    return f", did you mean `{close[0]}`?" if close else ""


def _section_of(annotation: Any) -> Any:
    """The Section inside an annotation such as `dict[str, Lane]` or `Routing | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_of(inner)
        if found is not None:
            return found
    return None


def load_config(*paths: Path | str) -> Config:
    """Read YAML or JSON files, later ones laid over earlier ones, and check the result.

    Raises UserError naming the file, and the line where YAML itself is broken.
    """
    values: dict[str, Any] = {}
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
            loaded = orjson.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
        except FileNotFoundError:
            raise UserError(f"{path}: no such config file") from None
        except (yaml.YAMLError, orjson.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}") from None
        if not isinstance(loaded, dict):
            raise UserError(f"{path}: must hold a mapping of settings, holds {type(loaded).__name__}")
        values = overlay(values, loaded)
    return parse_config(values, ", ".join(str(path) for path in paths))


def overlay(base: dict, over: dict) -> dict:
    """`over` laid on `base`: mappings merge key by key, anything else replaces. (Snakemake's own rule.)"""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = overlay(merged[key], value) if both else value
    return merged
