"""From a run file and the command line to a checked `RunConfig`, with all problems at once."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic_core import ErrorDetails

from refocused.config.check import Misfit, check_run, check_shape
from refocused.config.document import (
    COMMAND_LINE,
    Document,
    Setting,
    read_document,
    read_overrides,
)
from refocused.config.files import find_config
from refocused.config.fragment import fragment_problems, idle_offloads, read_fragment
from refocused.config.names import SECTIONS, unknown_section, unknown_setting, wants_text
from refocused.config.problems import wanted
from refocused.config.run import RunConfig
from refocused.config.shape import ModelShape, load_shape
from refocused.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A setting that the command line took over.

    Attributes:
        key: `section.key`.
        before: What the file says, as written, or the default.
        after: What the command line says, as written.
    """

    key: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run that may start.

    Attributes:
        config: All settings.
        shape: The shape that `model.preset` names.
        fragment: The DeepSpeed settings that `zero.fragment` names; empty without one.
        changes: What the command line changed.
        file: The run file.
    """

    config: RunConfig
    shape: ModelShape
    fragment: dict[str, Any]
    changes: list[Change]
    file: Path


def load_run(
    file: Path | str, overrides: Sequence[str] = (), *, name: str | None = None
) -> LoadedRun:
    """Read a run file with the model shape and the DeepSpeed settings that it names.

    Args:
        file: A path, or the name of a file in `config/runs`.
        overrides: `section.key=value`; they win over the file.
        name: `run.name`; wins over both. Without any the file's own name is taken.

    Raises:
        ConfigError: Everything that is wrong, one line each, with where it was written.
    """
    source = _Source.read(find_config("runs", file), overrides, name=name)
    config, shape, fragment = source.decode(), source.shape(), source.fragment()
    if config is not None and shape is not None:
        source.add_misfits(check_shape(config, shape))
    if config is not None and fragment is not None:
        source.add_misfits(
            Misfit("zero.fragment", problem)
            for problem in idle_offloads(fragment, zero=config.zero)
        )
    source.refuse_problems()
    assert config is not None and shape is not None and fragment is not None
    return LoadedRun(config, shape, fragment, source.changes(), source.file)


def read_run(file: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the settings alone, for commands that look at a run and build no model.

    Raises:
        ConfigError: Everything that is wrong, one line each, with where it was written.
    """
    source = _Source.read(find_config("runs", file), overrides, name=None)
    config = source.decode()
    source.refuse_problems()
    assert config is not None
    return config


def render_run(config: RunConfig) -> str:
    """Write every setting, defaults included, as YAML that `load_run` reads back to the same."""
    text: str = yaml.dump(
        config.model_dump(mode="json"),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Safe YAML that escapes U+0085, which would be read back as a line feed otherwise."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "\x85" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


@dataclasses.dataclass(slots=True)
class _Source:
    """A run file with the command line on top, and what was found wrong so far."""

    file: Path
    written: Document
    typed: Document
    problems: list[str]

    @classmethod
    def read(cls, file: Path, overrides: Sequence[str], *, name: str | None) -> _Source:
        written, typed = read_document(file), read_overrides(overrides)
        if name is not None:
            typed.settings["run", "name"] = Setting(name, name, name, COMMAND_LINE)
        problems = [*written.problems, *typed.problems]
        problems += _unknown_names(written) + _unknown_names(typed)
        return cls(file, written, typed, problems)

    def decode(self) -> RunConfig | None:
        """Build the settings; None after adding what is wrong with them."""
        try:
            config = RunConfig.model_validate(self._values())
        except pydantic.ValidationError as failure:
            self.problems += [self._explain(error) for error in failure.errors()]
            return None
        self.add_misfits(check_run(config))
        return config

    def shape(self) -> ModelShape | None:
        """Read the shape that `model.preset` names; None after adding what is wrong with it."""
        preset = self._setting("model", "preset")
        if preset is None or not isinstance(preset.plain, str):
            return None
        try:
            return load_shape(find_config("models", preset.plain, beside=self.file))
        except ConfigError as error:
            self.add_misfits([Misfit("model.preset", str(error))])
            return None

    def fragment(self) -> dict[str, Any] | None:
        """Read what `zero.fragment` names; None after adding what is wrong with it."""
        name = self._setting("zero", "fragment")
        if name is None or not isinstance(name.plain, str):
            return {}
        try:
            file = find_config("deepspeed", name.plain, beside=self.file)
            fragment = read_fragment(file)
        except ConfigError as error:
            self.add_misfits([Misfit("zero.fragment", str(error))])
            return None
        problems = fragment_problems(fragment)
        self.problems += [f"{file}: {problem}" for problem in problems]
        return None if problems else fragment

    def refuse_problems(self) -> None:
        """Raise one error with every problem found so far."""
        if self.problems:
            raise ConfigError("\n".join(sorted(self.problems, key=self._line)))

    def changes(self) -> list[Change]:
        """List what the command line set to something else than the file."""
        changes = []
        for (section, key), setting in self.typed.settings.items():
            below = self.written.settings.get((section, key))
            if below is None or below.value != setting.value:
                before = _default(section, key) if below is None else below.text
                changes.append(Change(f"{section}.{key}", before, setting.text))
        return changes

    def _values(self) -> dict[str, dict[str, Any]]:
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        values["run"]["name"] = self.file.stem
        for (section, key), setting in (self.written.settings | self.typed.settings).items():
            if section in SECTIONS and key in SECTIONS[section].model_fields:
                text = wants_text(section, key)
                values[section][key] = setting.plain if text else setting.value
        return values

    def _setting(self, section: str, key: str) -> Setting | None:
        return self.typed.settings.get((section, key), self.written.settings.get((section, key)))

    def _explain(self, error: ErrorDetails) -> str:
        """Say one of pydantic's findings with the place it was written at."""
        section, *rest = (str(part) for part in error["loc"])
        if not rest:  # the section's settings do not fit each other
            return f"{self.written.sections.get(section, self.file)}: {section}: {wanted(error)}"
        key = f"{section}.{rest[0]}"
        setting = self._setting(section, rest[0])
        if setting is None:
            if error["type"] == "missing":
                return f"{self.file}: {key} is missing"
            return (
                f"{self.file}: {key} = {error['input']!r} (from the file's name): {wanted(error)}"
            )
        return f"{setting.origin}: {key} = {_shown(setting)}: {wanted(error)}"

    def _line(self, problem: str) -> float:
        """Sort by line; what is missing comes after, and the command line last."""
        if problem.startswith(COMMAND_LINE):
            return math.inf
        line = re.match(r":(\d+):", problem.removeprefix(str(self.file)))
        return int(line[1]) if line else sys.maxsize

    def add_misfits(self, misfits: Iterable[Misfit]) -> None:
        """Add problems, each with the place where its setting was written."""
        for misfit in misfits:
            section, _, key = misfit.key.partition(".")
            setting = self._setting(section, key)
            origin = self.file if setting is None else setting.origin
            shown = _default(section, key) if setting is None else _shown(setting)
            self.problems.append(f"{origin}: {misfit.key} = {shown}: {misfit.message}")


def _unknown_names(document: Document) -> list[str]:
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
        f"{setting.origin}: {unknown_setting(section, key)}"
        for (section, key), setting in document.settings.items()
        if section in SECTIONS and key not in SECTIONS[section].model_fields
    ]


def _shown(setting: Setting) -> str:
    """Write a value so that text and other things can be told apart."""
    if isinstance(setting.value, str):
        return repr(setting.value)
    return "null" if setting.value is None else " ".join(setting.text.split())


def _default(section: str, key: str) -> str:
    field = SECTIONS[section].model_fields[key]
    return "not set" if field.is_required() else json.dumps(field.default)
