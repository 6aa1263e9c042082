"""List every setting of a run with its type, default, meaning and example, from the models."""

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from refocused.config.run_config import RunConfig

REQUIRED = "required"
# Of two settings of which one is required, those in the annotated run file.
CHOSEN = ("batch.windows", "data.source")
WORDS = {  # for the types of a JSON schema
    "integer": "whole number",
    "number": "number",
    "boolean": "true | false",
    "string": "text",
    "null": "null",
    "array": "list",
    "object": "names with settings of their own",
}
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
    example: str  # a value as YAML, where possible not the default


def list_settings() -> list[Setting]:
    """Return all settings in the order of the run file's sections."""
    schema = RunConfig.model_json_schema()
    sections = schema["properties"]
    return [
        setting
        for name, section in sections.items()
        for setting in _of_section(name, section, schema["$defs"])
    ]


def annotated_run() -> str:
    """Return a run file with every setting: its default or example, and its meaning in a comment.

    Settings of a source of the mixture are comments, since the file has no mixture.
    """
    lines = [
        "# Every setting of a run with its default, or an example where there is none.",
        "# Made by: refocused train --settings --yaml",
    ]
    settings = itertools.groupby(list_settings(), lambda one: one.name.split(".")[0])
    for section, group in settings:
        lines += ["", f"{section}:"]
        for one in group:
            is_needed, (head, _, key) = one.default == REQUIRED, one.name.rpartition(".")
            value = one.example if is_needed or one.name in CHOSEN else one.default
            begin = "  " if head == section else "  #   "  # those of a source only as comments
            lines += textwrap.wrap(one.meaning, 96, initial_indent="  # ", subsequent_indent="  # ")
            other = REQUIRED if is_needed else f"e.g. {one.example}"
            lines.append(f"{begin}{key}: {value}  # {one.kind}; {other}")
    return "\n".join(lines) + "\n"


def _of_section(
    name: str, section: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[Setting]:
    fields = definitions[section["$ref"].rpartition("/")[2]]
    for key, field in fields["properties"].items():
        is_required = key in fields.get("required", ())
        default = REQUIRED if is_required else json.dumps(field["default"], ensure_ascii=False)
        meaning, kind = " ".join(field["description"].split()), _kind(field)
        choices = set(kind.split(" | ")) - {*WORDS.values(), "null", default.strip('"')}
        example = [*field.get("examples", ()), *sorted(choices, key=kind.index), ""][0]
        yield Setting(f"{name}.{key}", kind, default, meaning, example)
        inner = field.get("additionalProperties", {})
        if "$ref" in inner:
            yield from _of_section(f"{name}.{key}.NAME", inner, definitions)


def _kind(field: Mapping[str, Any]) -> str:
    choices = field.get("anyOf", field.get("oneOf"))
    if choices:
        return " | ".join(_kind(one) for one in choices)
    if "enum" in field or "const" in field:
        return " | ".join(str(one) for one in field.get("enum", [field.get("const")]))
    bounds = [f"{word} {field[key]:g}" for key, word in LIMITS.items() if key in field]
    return " ".join([WORDS[field["type"]], *bounds])
