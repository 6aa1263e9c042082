"""Settings by name, and what a mistyped one may have meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo

from refocused.config.run_config import RunConfig
from refocused.config.section import Section
from refocused.config.yaml_source import Document, SettingPath

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_WANTED = {
    "bool_parsing": "true or false is wanted",
    "bool_type": "true or false is wanted",
    "dict_type": "a group of settings is wanted",
    "finite_number": "a finite number is wanted",
    "float_parsing": "a number is wanted",
    "float_type": "a number is wanted",
    "greater_than": "more than {gt} is wanted",
    "greater_than_equal": "at least {ge} is wanted",
    "int_parsing": "a whole number is wanted",
    "int_type": "a whole number is wanted",
    "less_than": "less than {lt} is wanted",
    "less_than_equal": "at most {le} is wanted",
    "list_type": "a list is wanted",
    "missing": "too few values",
    "model_type": "a group of settings is wanted",
    "string_type": "text is wanted",
    "too_long": "at most {max_length} values are wanted",
    "tuple_type": "a list is wanted, such as [a, b]",
}


def wanted(error: ErrorDetails) -> str:
    """Turn one of pydantic's findings into what was wanted instead.

    A message of our own validators is given as it is; one that this module does not know is given
    in pydantic's words.
    """
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] == "literal_error":
        return _one_of(str(context["expected"]), str(error["input"]))
    template = _WANTED.get(error["type"])
    if template is None:
        return error["msg"][0].lower() + error["msg"][1:]
    return template.format(**{key: _number(value) for key, value in context.items()})


def _one_of(expected: str, found: str) -> str:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(found, choices, n=1)
    hint = f". Did you mean {near[0]}?" if near else ""
    return f"one of {', '.join(choices)} is wanted{hint}"


def _number(value: object) -> str:
    """Write 1.0 as 1."""
    return f"{value:g}" if isinstance(value, float) else str(value)


SECTIONS: dict[str, type[Section]] = {
    name: typing.cast("type[Section]", field.annotation)
    for name, field in RunConfig.model_fields.items()
}

# What other trainers call these settings.
_SYNONYMS = {
    "accumulation_steps": "batch.accumulation",
    "adam_epsilon": "optimizer.eps",
    "batch_size": "batch.micro",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "block_size": "model.sequence_length",
    "bucket": "data.source",
    "context_length": "model.sequence_length",
    "cpu_offload": "zero.offload_optimizer",
    "data_dir": "data.source",
    "dataset": "data.source",
    "dtype": "precision.dtype",
    "epsilon": "optimizer.eps",
    "eval_interval": "evaluation.interval",
    "eval_steps": "evaluation.interval",
    "global_batch_size": "batch.windows",
    "grad_clip": "optimizer.clip",
    "gradient_accumulation": "batch.accumulation",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_checkpointing": "model.activation_checkpointing",
    "gradient_clipping": "optimizer.clip",
    "learning_rate": "optimizer.lr",
    "log_interval": "log.interval",
    "logging_steps": "log.interval",
    "lr_scheduler": "schedule.kind",
    "max_grad_norm": "optimizer.clip",
    "max_iters": "run.steps",
    "max_length": "model.sequence_length",
    "max_lr": "optimizer.lr",
    "max_steps": "run.steps",
    "micro_batch": "batch.micro",
    "micro_batch_size": "batch.micro",
    "min_lr": "schedule.floor_fraction",
    "min_lr_ratio": "schedule.floor_fraction",
    "mixed_precision": "precision.dtype",
    "n_steps": "run.steps",
    "num_steps": "run.steps",
    "output_dir": "run.directory",
    "precision": "precision.dtype",
    "price": "cost.per_hour_usd",
    "save_interval": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "schedule.kind",
    "seq_len": "model.sequence_length",
    "seq_length": "model.sequence_length",
    "total_steps": "run.steps",
    "train_batch_size": "batch.windows",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "val_split": "data.validation_fraction",
    "vocab_size": "model.vocabulary",
    "warmup": "schedule.warmup_steps",
    "warmup_steps": "schedule.warmup_steps",
    "zero_stage": "zero.stage",
}
_SECTION_SYNONYMS = {
    "checkpointing": "checkpoint",
    "checkpoints": "checkpoint",
    "dataset": "data",
    "eval": "evaluation",
    "logging": "log",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",
    "trainer": "run",
    "training": "run",
    "validation": "evaluation",
    "zero_optimization": "zero",
}


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean X?` for the nearest choice, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""


def unknown_names(document: Document) -> list[str]:
    """Return one line for each name of a document that no section and no setting has."""
    problems = [
        f"{origin}: {unknown_section(section)}"
        for section, origin in document.sections.items()
        if section not in SECTIONS
    ]
    problems += [
        f"{origin}: {section} is a section: write its settings below it, one `key: value` a line."
        for section, origin in document.not_groups.items()
        if section in SECTIONS
    ]
    return problems + [
        f"{setting.origin}: {problem}"
        for path, setting in document.settings.items()
        if path[0] in SECTIONS and (problem := _unknown_name(path, document)) is not None
    ]


def _unknown_name(path: SettingPath, document: Document) -> str | None:
    """Say what is wrong with a name; None when it is known, or when what holds it is refused."""
    if is_group(path) or field_of(path) is not None:
        return None
    if len(path) == 2:
        return unknown_setting(*path)
    holder = path[:2] if not is_group(path[:2]) else path[:4]
    if holder != path and holder in document.settings:
        return None
    if field_of(path[:2]) is None:
        return unknown_setting(*path[:2])
    return unknown_part(path)


def unknown_section(name: str) -> str:
    """Say that a top-level name is no section, and what may have been meant."""
    text = f"{name} is not a section."
    if name in _SECTION_SYNONYMS:
        return f"{text} Did you mean {_SECTION_SYNONYMS[name]}?"
    section, _, key = name.partition(".")
    if key in _keys(section):
        return f"{text} Write {key} below {section}:."
    homes = _homes(name)
    if homes:
        return f"{text} Did you mean {' or '.join(homes)}?"
    return text + (did_you_mean(name, SECTIONS) or f" There are {', '.join(SECTIONS)}.")


def unknown_setting(section: str, key: str) -> str:
    """Say that a key is no setting of a section, and what may have been meant."""
    text = f"{section}.{key} is not a setting."
    homes = _homes(key)
    if homes:
        return f"{text} Did you mean {' or '.join(homes)}?"
    siblings = [f"{section}.{name}" for name in _keys(section)]
    everywhere = [f"{home}.{name}" for home in SECTIONS for name in _keys(home)]
    return text + (
        did_you_mean(f"{section}.{key}", siblings)
        or did_you_mean(f"{section}.{key}", everywhere)
        or f" {section} has {', '.join(_keys(section))}."
    )


def unknown_part(path: Sequence[str]) -> str:
    """Say that a name inside a setting is no setting, and what may have been meant."""
    text = f"{'.'.join(path)} is not a setting."
    entry = _entry_type(path[0], path[1])
    if entry is None or len(path) != 4:
        holder = ".".join(path[:2] if entry is None else path[:4])
        return f"{text} {holder} takes a value of its own."
    inside = ".".join(path[:3])
    near = did_you_mean(path[3], settings_of(entry))
    if near:
        return text + near.replace("mean ", f"mean {inside}.")
    return f"{text} {inside} has {', '.join(settings_of(entry))}."


def field_of(path: Sequence[str]) -> FieldInfo | None:
    """Describe a setting; None where there is none of that name, or a group of settings."""
    if len(path) == 2:
        return _field(path[0], path[1])
    entry = _entry_type(path[0], path[1])
    return settings_of(entry).get(path[3]) if entry is not None and len(path) == 4 else None


def is_group(path: Sequence[str]) -> bool:
    """Tell whether a name holds further names: `data.mixture`, and each source in it."""
    return len(path) in (2, 3) and _entry_type(path[0], path[1]) is not None


def wants_text(*path: str) -> bool:
    """Tell whether a setting holds text, or a list of texts, and nothing else."""
    field = field_of(path)
    return field is not None and (
        _leaf_types(field.annotation) - {types.NoneType, Ellipsis} == {str}
    )


def settings_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Describe a section's settings by the names that a run file gives them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _field(section: str, key: str) -> FieldInfo | None:
    return settings_of(SECTIONS[section]).get(key) if section in SECTIONS else None


def _entry_type(section: str, key: str) -> type[Section] | None:
    """What each entry of a setting is made of, where the setting is a group of named sections."""
    field = _field(section, key)
    if field is None or typing.get_origin(field.annotation) is not dict:
        return None
    entry: type[Section] = typing.get_args(field.annotation)[1]
    return entry


def _keys(section: str) -> list[str]:
    return list(settings_of(SECTIONS[section])) if section in SECTIONS else []


def _homes(key: str) -> list[str]:
    """Where a key belongs: under its own name in other sections, else under our word for it."""
    homes = [f"{section}.{key}" for section in SECTIONS if key in _keys(section)]
    return homes or [_SYNONYMS[key]] if key in _SYNONYMS else homes


def _leaf_types(annotation: Any) -> set[Any]:
    arguments = typing.get_args(annotation)
    if not arguments or typing.get_origin(annotation) is typing.Literal:
        return {annotation}
    return set().union(*(_leaf_types(argument) for argument in arguments))
