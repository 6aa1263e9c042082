"""List every setting of a run with its type, default and meaning, from the sections' fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from refocused.config.run_config import RunConfig

REQUIRED = "required"
# Of a JSON schema; the short forms are those of fields that a validator reads first.
LIMITS = {"minimum": "from", "ge": "from", "exclusiveMinimum": "above", "gt": "above"}
LIMITS |= {"maximum": "to", "le": "to", "exclusiveMaximum": "below", "lt": "below"}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a run file."""

    name: str  # `section.key`
    kind: str  # the values that it takes
    default: str  # as YAML; `REQUIRED` without one
    meaning: str


def list_settings() -> list[Setting]:
    """Return all settings in the order of the run file's sections."""
    schema = RunConfig.model_json_schema()
    sections = schema["properties"]
    return [
        setting
        for name, section in sections.items()
        for setting in _of_section(name, section, schema["$defs"])
    ]


def _of_section(
    name: str, section: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[Setting]:
    fields = definitions[section["$ref"].rpartition("/")[2]]
    for key, field in fields["properties"].items():
        is_required = key in fields.get("required", ())
        default = REQUIRED if is_required else json.dumps(field["default"], ensure_ascii=False)
        meaning = " ".join(field["description"].split())
        yield Setting(f"{name}.{key}", _kind(field), default, meaning)
        inner = field.get("additionalProperties", {})
        if "$ref" in inner:
            yield from _of_section(f"{name}.{key}.NAME", inner, definitions)


def _kind(field: Mapping[str, Any]) -> str:
    """Describe the values of a field of a JSON schema."""
    choices = field.get("anyOf", field.get("oneOf"))
    if choices:
        return " | ".join(_kind(one) for one in choices)
    if "enum" in field or "const" in field:
        return " | ".join(str(one) for one in field.get("enum", [field.get("const")]))
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true | false",
        "string": "text",
        "null": "null",
        "array": "list",
        "object": "names with settings of their own",
    }
    bounds = [f"{word} {field[key]:g}" for key, word in LIMITS.items() if key in field]
    return " ".join([words[field["type"]], *bounds])
