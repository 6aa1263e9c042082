"""Load a run file with the command line's changes into a checked `RunConfig`."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import pydantic
from pydantic_core import ErrorDetails

from refocused.config import shipped_files, yaml_source
from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import idle_offloads, read_fragment
from refocused.config.model_shape import ModelShape, load_shape
from refocused.config.outputs import without_secrets
from refocused.config.run_config import Misfit, RunConfig, check_run, check_shape
from refocused.config.section import CountOrZero, as_yaml
from refocused.config.setting_help import RENAMED, SECTIONS, settings_in, unknown_name, wanted
from refocused.system.errors import ConfigError, counted, did_you_mean, local_path

T = TypeVar("T")
Kind = Literal["runs", "models", "deepspeed"]
_SUFFIXES: dict[Kind, str] = {"runs": ".yaml", "models": ".json", "deepspeed": ".json"}
_COUNT: pydantic.TypeAdapter[int] = pydantic.TypeAdapter(CountOrZero)
_SHORTENED_WARMUP = 10  # steps of a shortened run for each of its warmup


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A setting that the command line changed from the file's value or the default."""

    key: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedRun:
    """A checked run."""

    config: RunConfig
    shape: ModelShape  # of `model.preset`, with `model.vocabulary` unless that is still `auto`
    fragment: dict[str, Any]  # DeepSpeed settings of `zero.fragment`, if any
    changes: list[Change]  # made by the command line
    file: Path

    def with_vocabulary(self, vocabulary: int) -> Self:
        """Return the run with this in place of `auto`; raise ConfigError if settings misfit."""
        if self.config.model.vocabulary != "auto":
            return self
        model = self.config.model.model_copy(update={"vocabulary": vocabulary})
        config = self.config.model_copy(update={"model": model})
        shape = self.shape.with_vocabulary(vocabulary)
        problems = [
            f"{self.file}: {misfit.key}: {misfit.message}" for misfit in check_shape(config, shape)
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        return dataclasses.replace(self, config=config, shape=shape)

    def with_tokens(self, count: Callable[[], int]) -> Self:
        """Return the run with the tokens of `run.epochs`, which `count` reads from the data."""
        if self.config.run.epochs is None or self.config.run.tokens is not None:
            return self
        run = self.config.run.model_copy(update={"tokens": count()})
        return dataclasses.replace(self, config=self.config.model_copy(update={"run": run}))

    def with_steps(self, plan: BatchPlan, *, made: int = 0, trained: int = 0) -> Self:
        """Return the run with the steps that its tokens take in all; `run.steps` stay as given.

        A resume has `made` steps and `trained` on tokens, which count.

        Raises:
            ConfigError: The tokens are less than a step, or end within a warmup.
        """
        if (tokens := self.config.run.tokens) is None:
            return self
        steps = plan.steps_for(tokens - trained, made=made)
        run = self.config.run.model_copy(update={"steps": steps})
        config = self.config.model_copy(update={"run": run})
        problems = [f"{misfit.key}: {misfit.message}" for misfit in check_run(config)]
        if tokens < plan.sequences_between(0, 1) * plan.sequence_length:
            problems = [f"less than the tokens of a step ({plan.tokens:,}). Raise it."]
        if problems and steps > made:
            text = f"{self.file}: {self.config.run.length} ({counted(steps, 'step')}): "
            raise ConfigError("\n".join(f"{text}{problem}" for problem in problems))
        return dataclasses.replace(self, config=config)


def load_run(
    file: Path | str, overrides: Sequence[str] = (), *, name: str | None = None
) -> LoadedRun:
    """Load a run file with the model shape and the DeepSpeed settings that it names.

    Args:
        file: Path, or name of a shipped run file.
        overrides: Settings, each `section.key=value`, that replace the file's.
        name: Replaces `run.name`, whose default is the name of the file.

    Raises:
        ConfigError: The run is wrong; one line for each problem, with the place of its setting.
    """
    source = _Source(find_config("runs", file), overrides, name=name)
    config, shape = source.decode(), source.read("model.preset", "models", load_shape)
    fragment = source.read("zero.fragment", "deepspeed", read_fragment) or {}
    if config is not None and shape is not None:
        if isinstance(config.model.vocabulary, int):
            shape = shape.with_vocabulary(config.model.vocabulary)
        source.add_misfits(check_shape(config, shape))
    if config is not None:
        idle = idle_offloads(fragment, zero=config.zero)
        source.add_misfits(Misfit("zero.fragment", problem) for problem in idle)
    source.refuse_problems()
    assert config is not None and shape is not None
    return LoadedRun(config, shape, fragment, source.changes(), source.file)


def read_run(file: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load only the settings, for commands that build no model; raise as `load_run`."""
    source = _Source(find_config("runs", file), overrides)
    config = source.decode()
    source.refuse_problems()
    assert config is not None
    return config


def render_run(config: RunConfig) -> str:
    """Return all settings, defaults included, as YAML from which `load_run` gets the same."""
    return yaml_source.write_yaml(config.model_dump(mode="json"))


def find_config(kind: Kind, name: str | Path, *, beside: Path | None = None) -> Path:
    """Find a run, a model shape or a DeepSpeed fragment by a path, or by the name of a shipped one.

    `config/KIND/NAME` without such a file in the current folder means the shipped one too. The
    `config/` folder that holds `beside`, a run file, is searched before the shipped files.

    Raises:
        ConfigError: There is none; the message names those that exist.
    """
    path, suffix = local_path(name), _SUFFIXES[kind]
    if path.is_file():
        return path
    folders = [shipped_files() / kind]
    if beside is not None:
        folders.insert(0, beside.resolve().parent.parent / kind)
    # .yml is the other usual suffix of YAML.
    file_name = f"{str(name).removesuffix(suffix).removesuffix('.yml')}{suffix}"
    for folder in folders if path.parts[:-1] in ((), ("config", kind)) else ():
        if (file := folder / Path(file_name).name).is_file():
            return file
    there_are = sorted({file.stem for folder in folders for file in folder.glob(f"*{suffix}")})
    raise ConfigError(
        f"no file {file_name}.{did_you_mean(path.stem, there_are)} "
        f"There are {', '.join(there_are)} in config/{kind}; a path to a file works too."
    )


class _Source:
    """The settings of a run file and the command line, and their problems so far."""

    def __init__(self, file: Path, overrides: Sequence[str], *, name: str | None = None) -> None:
        written, typed = yaml_source.read_document(file), yaml_source.read_overrides(overrides)
        if name is not None:
            setting = yaml_source.Setting(name, name, yaml_source.COMMAND_LINE)
            typed.settings["run", "name"] = setting
        # The file's warmup is shortened if the command line's `run.steps` would end within it.
        key = ("schedule", "warmup_steps")
        steps, warmup = typed.settings.get(("run", "steps")), written.settings.get(key)
        if steps is not None and warmup is not None and key not in typed.settings:
            with contextlib.suppress(pydantic.ValidationError):  # reported by `decode`
                count = _COUNT.validate_python(steps.value)
                if _COUNT.validate_python(warmup.value) >= count:
                    shorter = count // _SHORTENED_WARMUP
                    text = f"{shorter} (1/{_SHORTENED_WARMUP} of run.steps={steps.text})"
                    setting = yaml_source.Setting(shorter, text, yaml_source.COMMAND_LINE)
                    typed.settings[key] = setting
        # The command line's length takes the place of the file's.
        lengths = [("run", unit) for unit in ("steps", "tokens", "epochs")]
        for path, other in itertools.permutations(lengths, 2):
            if getattr(typed.settings.get(path), "value", None) is not None:
                written.settings.pop(other, None)
        self.file = file
        self._written = written.settings
        self._typed = typed.settings
        self._settings = yaml_source.without_parts(self._written, self._typed) | self._typed
        self._problems = written.problems + typed.problems

    def decode(self) -> RunConfig | None:
        """Build the settings; on failure add the problems and return None."""
        values: dict[str, Any] = {section: {} for section in SECTIONS} | yaml_source.nested(
            self._settings
        )
        if isinstance(values["run"], dict):
            values["run"].setdefault("name", self.file.stem)
        while True:
            try:
                config = RunConfig.model_validate(values)
                break
            except pydantic.ValidationError as failure:
                errors = failure.errors()
            unknown = [error for error in errors if error["type"] == "extra_forbidden"]
            self._problems += [self._explain(error) for error in unknown or errors]
            if not unknown:
                return None
            for error in unknown:  # without them pydantic also checks settings against each other
                holder: Any = values
                for part in error["loc"][:-1]:
                    holder = holder[part]
                value = holder.pop(error["loc"][-1])
                if (present := RENAMED.get(".".join(map(str, error["loc"])))) is not None:
                    holder.setdefault(present.rpartition(".")[2], value)  # else it is missing, too
        self.add_misfits(check_run(config))
        return config

    def read(self, key: str, kind: Kind, read: Callable[[Path], T]) -> T | None:
        """Read the file that a setting names, if it is set; on failure add the problem."""
        setting = self._settings.get(tuple(key.split(".")))
        if setting is None or not isinstance(setting.value, str):
            return None
        try:
            return read(find_config(kind, setting.value, beside=self.file))
        except ConfigError as error:
            self.add_misfits([Misfit(key, str(error))])
            return None

    def refuse_problems(self) -> None:
        """Raise one error with all problems so far, in the order of the file."""
        if self._problems:
            raise ConfigError("\n".join(sorted(self._problems, key=self._line)))

    def changes(self) -> list[Change]:
        """List the settings whose value on the command line differs from the file's."""
        changes = []
        for path, setting in yaml_source.without_parts(self._typed, self._typed).items():
            below, name = self._written.get(path), ".".join(path)
            if below is None or as_yaml(below.value) != as_yaml(setting.value):
                known = [f"{name} {_one_line(each)}" for each in (below, setting) if each]
                *before, after = [without_secrets(text).partition(" ")[2] for text in known]
                changes.append(Change(name, before[0] if before else _default(path), after))
        return changes

    def add_misfits(self, misfits: Iterable[Misfit]) -> None:
        """Add problems with the place of their settings."""
        for key, message in misfits:
            path = tuple(key.split("."))
            setting = self._settings.get(path)
            origin = self.file if setting is None else setting.origin
            shown = _default(path) if setting is None else _shown(setting)
            stated = without_secrets(f"{key} = {shown}")
            self._problems.append(f"{origin}: {stated}: {message}")

    def _explain(self, error: ErrorDetails) -> str:
        """Describe one of pydantic's errors, with the place of its setting."""
        path = tuple(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            return f"{self._origin(path)}: {unknown_name(path)}"
        if len(path) == 1:
            section = self._settings.get(path)
            problem = f": {wanted(error)}"
            if error["type"] == "model_type":
                problem = " is a section: write its settings below it, one `key: value` a line."
            return f"{section.origin if section else self.file}: {path[0]}{problem}"
        written = path
        while len(written) > 2 and self._origin(written) is None:
            written = written[:-1]
        key, setting, origin = ".".join(written), self._settings.get(written), self._origin(written)
        is_group = setting is not None and setting.is_group
        if error["type"] == "missing" and not (setting and isinstance(setting.value, list)):
            return self._missing(path)
        if setting is None and origin is None:
            return (
                f"{self.file}: {key} = {error['input']!r} (from the file's name): {wanted(error)}"
            )
        inner = next(
            (
                path_below
                for path_below in self._settings
                if path_below[: len(written)] == written != path_below
            ),
            None,
        )
        if inner and isinstance(error["input"], dict) and not is_group:
            name, origin = ".".join(inner), self._settings[inner].origin
            return f"{origin}: {name} is not a setting. {key} takes a value of its own."
        if setting is None or (is_group and not isinstance(error["input"], dict)):
            return f"{origin}: {key}: {wanted(error)}"
        return f"{origin}: {without_secrets(f'{key} = {_shown(setting)}')}: {wanted(error)}"

    def _missing(self, path: yaml_source.SettingPath) -> str:
        """Describe a missing setting; its group may be misspelt on the command line."""
        group, key = path[:-1], ".".join(path)
        if len(group) == 1:
            return f"{self.file}: {key} is missing"
        siblings = [sibling[-1] for sibling in self._written if sibling[:-1] == group[:-1]]
        hint = "" if group in self._written else did_you_mean(group[-1], siblings)
        return f"{self._origin(group)}: {key} is missing{'.' if hint else ''}{hint}"

    def _origin(self, path: yaml_source.SettingPath) -> str | None:
        """Return the place of a setting or of its first part; None if it was not written."""
        written = (path, *(other for other in self._settings if other[: len(path)] == path))
        return next(
            (self._settings[other].origin for other in written if other in self._settings), None
        )

    def _line(self, problem: str) -> float:
        """Return a sort key: the line; missing settings come later, the command line last."""
        if problem.startswith(yaml_source.COMMAND_LINE):
            return math.inf
        line = re.match(r":(\d+):", problem.removeprefix(str(self.file)))
        return int(line[1]) if line else sys.maxsize


def _shown(setting: yaml_source.Setting) -> str:
    """Return a value as text; quotes distinguish strings from other values."""
    if isinstance(value := as_yaml(setting.value), str):
        return repr(value)
    return "null" if setting.value is None else _one_line(setting)


def _one_line(setting: yaml_source.Setting) -> str:
    return " ".join(setting.text.split())


def _default(path: yaml_source.SettingPath) -> str:
    field = settings_in(path[:-1]).get(path[-1])
    return "not set" if field is None or field.is_required() else json.dumps(field.default)
