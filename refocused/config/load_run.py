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

from refocused.config.consistency import Misfit, check_run, check_shape
from refocused.config.files import find_config
from refocused.config.fragment import fragment_problems, idle_offloads, read_fragment
from refocused.config.model_shape import ModelShape, load_shape
from refocused.config.run_config import RunConfig
from refocused.config.suggestions import (
    SECTIONS,
    did_you_mean,
    field_of,
    is_group,
    unknown_names,
    wanted,
    wants_text,
)
from refocused.config.yaml_source import (
    COMMAND_LINE,
    Document,
    Setting,
    SettingPath,
    read_document,
    read_overrides,
    without_parts,
)
from refocused.system.errors import ConfigError

SHORTENED_WARMUP = 10  # steps of a shortened run for each of its warmup


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A setting that the command line took over.

    Attributes:
        key: `section.key`, or longer inside a group.
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
        shape: The shape that `model.preset` names, with the vocabulary that `model.vocabulary`
            gives; while that is `auto`, the shape's own.
        fragment: The DeepSpeed settings that `zero.fragment` names; empty without one.
        changes: What the command line changed.
        file: The run file.
    """

    config: RunConfig
    shape: ModelShape
    fragment: dict[str, Any]
    changes: list[Change]
    file: Path

    def with_vocabulary(self, vocabulary: int) -> LoadedRun:
        """Return the run with a number in place of `model.vocabulary: auto`.

        Raises:
            ConfigError: A setting does not fit that number.
        """
        if self.config.model.vocabulary != "auto":
            return self
        model = self.config.model.model_copy(update={"vocabulary": vocabulary})
        config = self.config.model_copy(update={"model": model})
        shape = self.shape.with_vocabulary(vocabulary)
        problems = [f"{self.file}: {one.key}: {one.message}" for one in check_shape(config, shape)]
        if problems:
            raise ConfigError("\n".join(problems))
        return dataclasses.replace(self, config=config, shape=shape)


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
        if isinstance(config.model.vocabulary, int):
            shape = shape.with_vocabulary(config.model.vocabulary)
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
        _shorten_warmup(written, typed)
        problems = [*written.problems, *typed.problems]
        problems += unknown_names(written) + unknown_names(typed)
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
        for path, setting in without_parts(self.typed.settings, self.typed.settings).items():
            below = self.written.settings.get(path)
            if below is None or below.value != setting.value:
                before = _default(path) if below is None else _one_line(below)
                changes.append(Change(".".join(path), before, _one_line(setting)))
        return changes

    def _merged(self) -> dict[SettingPath, Setting]:
        return without_parts(self.written.settings, self.typed.settings) | self.typed.settings

    def _values(self) -> dict[str, dict[str, Any]]:
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        values["run"]["name"] = self.file.stem
        for path, setting in self._merged().items():
            if not (is_group(path) or field_of(path) is not None):
                continue  # refused as unknown
            inside: Any = values
            for name in path[:-1]:
                inside = inside.setdefault(name, {}) if isinstance(inside, dict) else None
            if not isinstance(inside, dict):
                continue  # the group itself is refused: it is set to a single value
            if is_group(path) and _holds_parts(setting):
                inside.setdefault(path[-1], {})
            else:
                inside[path[-1]] = setting.plain if wants_text(*path) else setting.value
        return values

    def _setting(self, *path: str) -> Setting | None:
        return self._merged().get(path)

    def _explain(self, error: ErrorDetails) -> str:
        """Say one of pydantic's findings with the place it was written at."""
        path = tuple(str(part) for part in error["loc"])
        if len(path) == 1:  # the section's settings do not fit each other
            return f"{self.written.sections.get(path[0], self.file)}: {path[0]}: {wanted(error)}"
        if error["type"] == "missing" and is_group(path[:-1]):
            return self._missing_part(path)
        settings = self._merged()
        while path not in settings and len(path) > 2 and not is_group(path):
            path = path[:-1]
        key, setting = ".".join(path), settings.get(path)
        if is_group(path) and (setting is None or _holds_parts(setting)):
            return f"{self._origin(path)}: {key}: {wanted(error)}"
        if setting is not None:
            return f"{setting.origin}: {key} = {_shown(setting)}: {wanted(error)}"
        if error["type"] == "missing":
            return f"{self.file}: {key} is missing"
        return f"{self.file}: {key} = {error['input']!r} (from the file's name): {wanted(error)}"

    def _missing_part(self, path: SettingPath) -> str:
        """Say that a group lacks a setting; one that the command line began may be misspelt."""
        group = path[:-1]
        text = f"{self._origin(group)}: {'.'.join(path)} is missing"
        if group in self.written.settings:
            return text
        siblings = [one[-1] for one in self.written.settings if one[:-1] == group[:-1]]
        return f"{text}.{hint}" if (hint := did_you_mean(group[-1], siblings)) else text

    def _origin(self, group: SettingPath) -> str:
        """Return where a group was written, or where the first of its parts was."""
        settings = self._merged()
        if group in settings:
            return settings[group].origin
        return next(s.origin for path, s in settings.items() if path[: len(group)] == group)

    def _line(self, problem: str) -> float:
        """Sort by line; what is missing comes after, and the command line last."""
        if problem.startswith(COMMAND_LINE):
            return math.inf
        line = re.match(r":(\d+):", problem.removeprefix(str(self.file)))
        return int(line[1]) if line else sys.maxsize

    def add_misfits(self, misfits: Iterable[Misfit]) -> None:
        """Add problems, each with the place where its setting was written."""
        for misfit in misfits:
            path = tuple(misfit.key.split("."))
            setting = self._setting(*path)
            origin = self.file if setting is None else setting.origin
            shown = _default(path) if setting is None else _shown(setting)
            self.problems.append(f"{origin}: {misfit.key} = {shown}: {misfit.message}")


def _shorten_warmup(written: Document, typed: Document) -> None:
    """Shorten a warmup that only the file names where the command line ends the run within it."""
    key = ("schedule", "warmup_steps")
    steps, warmup = typed.settings.get(("run", "steps")), written.settings.get(key)
    if steps is None or warmup is None or key in typed.settings:
        return
    if isinstance(steps.value, int) and isinstance(warmup.value, int):
        shorter = steps.value // SHORTENED_WARMUP
        if warmup.value >= steps.value > shorter >= 0:
            text = f"{shorter} (1/{SHORTENED_WARMUP} of run.steps={steps.text})"
            typed.settings[key] = Setting(shorter, str(shorter), text, COMMAND_LINE)


def _holds_parts(setting: Setting) -> bool:
    """Whether a group was written as one: an empty one has every line commented out."""
    return setting.value is None or isinstance(setting.value, dict)


def _shown(setting: Setting) -> str:
    """Write a value so that text and other things can be told apart."""
    if isinstance(setting.value, str):
        return repr(setting.value)
    return "null" if setting.value is None else _one_line(setting)


def _one_line(setting: Setting) -> str:
    """Return what was written, on one line."""
    return " ".join(setting.text.split())


def _default(path: SettingPath) -> str:
    field = field_of(path)
    if field is None or field.is_required():
        return "not set"
    return json.dumps(field.default)
