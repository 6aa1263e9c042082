"""List all settings, explain a wrong value of one, and suggest names for a mistyped one."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from refocused.config.data import SourceConfig, StageConfig
from refocused.config.run_config import RunConfig
from refocused.config.section import Section
from refocused.system.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from refocused.config.yaml_source import SettingPath

_WANTED = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "expected true or false, without quotes"),
    **dict.fromkeys(("dict_type", "model_type"), "expected a group of settings"),
    **dict.fromkeys(("float_parsing", "float_type"), "expected a number"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "expected a whole number"),
    "finite_number": "expected a finite number",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "list_type": "expected a list",
    "missing": "too few values",
    "string_type": "expected text, in quotes",
    "too_long": "expected at most {max_length} values",
    "tuple_type": "expected a list such as [a, b]",
}


def wanted(error: ErrorDetails) -> str:
    """Describe the value that pydantic expected."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        given = str(error["input"])
        hint = did_you_mean(VALUE_SYNONYMS.get(given, given), choices)
        return f"expected one of {', '.join(choices)}{'.' if hint else ''}{hint}"
    template = _WANTED.get(error["type"])
    if template is None:
        return error["msg"][0].lower() + error["msg"][1:]
    numbers = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
    return template.format(**numbers)


SECTIONS = {
    name: typing.cast("type[Section]", field.annotation)
    for name, field in RunConfig.model_fields.items()
}

# Settings renamed in version 0.1, by their earlier names; refused with the present one until 0.2.
RENAMED = {
    "batch.accumulation": "batch.gradient_accumulation_steps",
    "batch.micro": "batch.micro_batch_size",
    "batch.windows": "batch.global_batch_size",
    "evaluation.windows": "evaluation.sequences",
    "schedule.floor_fraction": "schedule.min_lr_ratio",
}
# The names of these settings in other trainers.
SYNONYMS = {
    synonym: setting
    for setting, synonyms in {
        "batch.gradient_accumulation_steps": "accumulation_steps gradient_accumulation",
        "batch.micro_batch_size": "batch_size micro_batch train_micro_batch_size_per_gpu",
        "batch.global_batch_size": "global_batch train_batch_size",
        "checkpoint.interval": "save_interval save_steps",
        "checkpoint.keep": "save_total_limit",
        "cost.per_hour_usd": "price",
        "data.source": "bucket data_dir dataset",
        "data.validation_fraction": "val_split",
        "evaluation.interval": "eval_interval eval_steps",
        "log.interval": "log_interval logging_steps",
        "model.activation_checkpointing": "gradient_checkpointing",
        "model.sequence_length": "block_size context_length max_length seq_len seq_length",
        "model.vocabulary": "vocab_size",
        "optimizer.betas": "beta1 beta2",
        "optimizer.clip": "grad_clip gradient_clipping max_grad_norm",
        "optimizer.eps": "adam_epsilon epsilon",
        "optimizer.head_lr": "lm_head_lr unembedding_lr",
        "optimizer.lr": "learning_rate max_lr",
        "precision.dtype": "dtype mixed_precision precision",
        "optimizer.momentum": "muon_momentum",
        "run.directory": "output_dir",
        "run.epochs": "n_epochs num_epochs num_train_epochs",
        "run.steps": "max_iters max_steps n_steps num_steps total_steps",
        "schedule.decay_fraction": "cooldown_frac decay_ratio warmdown_ratio",
        "schedule.min_lr_ratio": "final_lr_frac min_lr",
        "schedule.kind": "lr_scheduler scheduler",
        "schedule.warmup_steps": "warmup warmup_steps",
        "zero.offload_optimizer": "cpu_offload",
        "zero.stage": "zero_stage",
    }.items()
    for synonym in synonyms.split()
}
VALUE_SYNONYMS = {
    **{"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"},
    "auto": "chunked",  # of `model.head`, where it was the default
}
SECTION_SYNONYMS = {
    **dict.fromkeys(("checkpointing", "checkpoints"), "checkpoint"),
    **dict.fromkeys(("eval", "validation"), "evaluation"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("trainer", "training"), "run"),
    "dataset": "data",
    "logging": "log",
    "zero_optimization": "zero",
}


def settings_in(path: SettingPath) -> dict[str, FieldInfo]:
    """Return the settings of a section, or of an entry of `data.mixture` or `data.stages`."""
    section: type[Section] | None = SECTIONS.get(path[0]) if len(path) == 1 else None
    if len(path) == 3 and path[0] == "data":
        inner: dict[str, type[Section]] = {"mixture": SourceConfig, "stages": StageConfig}
        section = inner.get(path[1])
    fields = section.model_fields if section else {}
    return {field.alias or name: field for name, field in fields.items()}


def unknown_name(path: SettingPath) -> str:
    """Report that a name is not a section or setting, with the nearest names."""
    name, inside = path[-1], ".".join(path[:-1])
    if not inside:
        text, (section, _, key) = f"{name} is not a section.", name.partition(".")
        if name in SECTION_SYNONYMS:
            return f"{text} Did you mean {SECTION_SYNONYMS[name]}?"
        if key in settings_in((section,)):
            return f"{text} Write {key} below {section}:."
        if homes := _homes(name):
            return f"{text} Did you mean {' or '.join(homes)}?"
        return text + (did_you_mean(name, SECTIONS) or f" Sections: {', '.join(SECTIONS)}.")
    if (present := RENAMED.get(f"{inside}.{name}")) is not None:
        return f"{inside}.{name} is now {present}."
    text, known = f"{inside}.{name} is not a setting.", settings_in(path[:-1])
    if len(path) > 2:
        near = did_you_mean(name, known).replace("mean ", f"mean {inside}.")
    elif homes := _homes(name):
        near = f" Did you mean {' or '.join(homes)}?"
    else:
        everywhere = [f"{home}.{key}" for home in SECTIONS for key in settings_in((home,))]
        near = did_you_mean(f"{inside}.{name}", [f"{inside}.{key}" for key in known])
        near = near or did_you_mean(f"{inside}.{name}", everywhere)
    return text + (near or f" {inside} has {', '.join(known)}.")


def _homes(key: str) -> list[str]:
    """Return the settings that a key may mean: of that name elsewhere, else by a synonym."""
    homes = [f"{section}.{key}" for section in SECTIONS if key in settings_in((section,))]
    return homes or [SYNONYMS[key]] if key in SYNONYMS else homes


REQUIRED = "required"
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
class SettingInfo:
    """One setting of a run file."""

    name: str  # `section.key`
    kind: str  # the values that it takes
    default: str  # as YAML; `REQUIRED` without one
    meaning: str
    example: str  # a value as YAML, where possible not the default


def list_settings() -> list[SettingInfo]:
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
) -> Iterator[SettingInfo]:
    fields = definitions[section["$ref"].rpartition("/")[2]]
    for key, field in fields["properties"].items():
        is_required = key in fields.get("required", ())
        default = REQUIRED if is_required else json.dumps(field["default"], ensure_ascii=False)
        meaning, kind = " ".join(field["description"].split()), _kind(field)
        choices = set(kind.split(" | ")) - {*WORDS.values(), "null", default.strip('"')}
        example = [*field.get("examples", ()), *sorted(choices, key=kind.index), ""][0]
        yield SettingInfo(f"{name}.{key}", kind, default, meaning, example)
        inner = field.get("additionalProperties", {})
        if "$ref" in inner:
            yield from _of_section(f"{name}.{key}.NAME", inner, definitions)


def _kind(field: Mapping[str, Any]) -> str:
    choices = field.get("anyOf", field.get("oneOf"))
    if choices:
        return " | ".join(_kind(choice) for choice in choices)
    if "enum" in field or "const" in field:
        return " | ".join(str(choice) for choice in field.get("enum", [field.get("const")]))
    bounds = [f"{word} {field[key]:g}" for key, word in LIMITS.items() if key in field]
    return " ".join([WORDS[field["type"]], *bounds])
