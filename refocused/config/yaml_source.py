"""Read untrusted YAML 1.2 within limits, and run files with the line of every setting."""

import dataclasses
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ruamel.yaml
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import BaseResolver

from refocused.config.outputs import without_secrets
from refocused.config.section import Scalar, as_yaml
from refocused.system.errors import ConfigError
from refocused.system.strict_json import MAX_DIGITS, MalformedError

LARGEST_CHARACTERS = 200_000  # ruamel.yaml takes about 3 s for so many
DEEPEST = 40  # levels: ruamel.yaml makes three calls for each
MOST_NODES = 100_000  # with aliases followed
COMMAND_LINE = "command line"
_SURROGATE = re.compile("[\ud800-\udfff]")
SettingPath = tuple[str, ...]


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


# The core schema (https://yaml.org/spec/1.2.2/#103-core-schema). ruamel.yaml's own resolver also
# makes numbers of `1_000` and `0b1`, a date of `2024-01-01`, and text of `.5e3`.
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_CORE_SCHEMA: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": ("~|null|Null|NULL|", lambda text: None),
    "bool": ("true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": ("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _whole),
    "float": (_FLOAT, lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text))),
    "str": (r"[\s\S]*", str),
}


class _CoreResolver(BaseResolver):
    """Finds the type of a scalar without quotes, whatever version a `%YAML` line names."""

    processing_version = (1, 2)

    def __init__(self, version: object = None, loader: Any = None) -> None:
        super().__init__(loader)


for _kind, (_pattern, _) in _CORE_SCHEMA.items():
    _regex = re.compile(rf"(?:{_pattern})\Z")
    _CoreResolver.add_implicit_resolver_base(f"tag:yaml.org,2002:{_kind}", _regex, first=None)


class _Representer(SafeRepresenter):
    """Escapes U+0085, which would be read back as a line feed."""

    def represent_str(self, data: str) -> Any:
        style = '"' if "\x85" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> ruamel.yaml.YAML:
    yaml = ruamel.yaml.YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer, yaml.max_depth = _CoreResolver, _Representer, DEEPEST
    yaml.composer.warn_double_anchors = False
    yaml.default_flow_style, yaml.width = False, 100
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def write_yaml(value: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in its own order."""
    text = io.StringIO()
    _yaml().dump(value, text)
    return text.getvalue()


def parse_yaml(content: bytes | str) -> Any:
    """Parse one YAML document, whose mappings have scalars as names.

    Raises:
        MalformedError: It is not YAML or UTF-8, too long or too deep, a name is there twice, or
            its aliases expand too much.
    """
    try:
        document = Document(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
        value = as_yaml(document.read(document.root, path=()))
    except UnicodeDecodeError as error:
        raise MalformedError(f"byte {error.start:,} is not UTF-8") from None
    except YAMLError as error:
        line, reason = _explained(error)
        raise MalformedError(f"{f'line {line}: ' if line else ''}{reason}") from None
    for problem in document.problems:
        raise MalformedError(problem)
    return value


def parse_yaml_mapping(content: bytes | str) -> dict[str, Any]:
    """Parse a YAML mapping; an empty document is an empty mapping."""
    value = parse_yaml(content)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedError("it is not a mapping of names")
    return value


def _refusal(problem: str, node: Any) -> YAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _explained(error: YAMLError) -> tuple[int | None, str]:
    """Return the line of a YAML error, if known, and its reason on one line."""
    if not isinstance(error, MarkedYAMLError):
        return None, " ".join(str(error).split())
    mark = error.problem_mark
    reason = f"{error.context}, {error.problem}" if error.context else str(error.problem)
    return mark.line + 1 if mark else None, " ".join(reason.split())


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written."""

    value: Any  # with every scalar as a `Scalar`, for settings that are text
    text: str  # the characters as written
    origin: str  # `file:line`, or `command line`

    @property
    def is_group(self) -> bool:
        """Whether it is a mapping; its settings have entries of their own."""
        return isinstance(self.value, dict)


class Document:
    """A YAML document: its settings by path, such as (section, key), and problems, a line each."""

    def __init__(self, text: str = "", *, origin: Callable[[int], str] = "line {}".format) -> None:
        self.settings: dict[SettingPath, Setting] = {}
        self.problems: list[str] = []
        self.text = text
        self.origin = origin  # of a line, for messages
        self._nodes = 0  # read so far
        if len(text) > LARGEST_CHARACTERS:
            raise YAMLError(
                f"it has {len(text):,} characters; at most {LARGEST_CHARACTERS:,} are allowed"
            )
        try:
            self.root: Any = _yaml().compose(text)  # of the document's nodes; None if it is empty
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise YAMLError(f"{type(error).__name__}: {error}") from None  # by what is damaged

    def read(self, node: Any, *, path: SettingPath | None, depth: int = 1) -> Any:
        """Return a node's value with every scalar as a `Scalar`; note the settings below `path`.

        Settings inside a list have no path. Raises YAMLError for what is not allowed.
        """
        if node is None:
            return None  # of an empty document
        self._nodes += 1
        if depth > DEEPEST or self._nodes > MOST_NODES:
            problem = "an alias contains itself, or its aliases expand to more than "
            raise _refusal(f"{problem}{DEEPEST} levels or {MOST_NODES:,} values", node)
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if isinstance(node, ScalarNode) and kind in _CORE_SCHEMA:
            scalar, (pattern, construct) = Scalar(node.value), _CORE_SCHEMA[kind]
            try:
                if not re.fullmatch(pattern, node.value) or _SURROGATE.search(node.value):
                    raise ValueError
                scalar.value = construct(node.value)
            except ValueError:
                raise _refusal(f"{node.value!r:.40} is not a valid {kind}", node) from None
            return None if kind == "null" else scalar
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.read(child, path=None, depth=depth + 1) for child in node.value]
        if not isinstance(node, MappingNode) or kind != "map":
            raise _refusal(f"the tag {node.tag} is not allowed", node)
        values, lines = dict[str, Any](), dict[str, int]()
        for name_node, child in node.value:
            if not isinstance(name_node, ScalarNode):
                raise _refusal("a name is text", name_node)
            self.read(name_node, path=None)
            name, line = str(name_node.value), name_node.start_mark.line + 1
            inner = None if path is None else (*path, name)
            if name in lines:  # YAML itself would take the second one
                first = "" if lines[name] == line else f", first on line {lines[name]}"
                twice = f"{'.'.join(inner or (name,))} is set twice{first}. Keep one."
                self.problems.append(f"{self.origin(line)}: {twice}")
                continue
            lines[name] = line
            values[name] = self.read(child, path=inner, depth=depth + 1)
            if inner is not None:
                text = self.text[child.start_mark.index : child.end_mark.index].strip()
                self.settings[inner] = Setting(values[name], text, self.origin(line))
        return values


def read_document(file: Path) -> Document:
    """Read a run file; raise ConfigError if it is not text, not YAML or not a mapping."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        document = Document(text, origin=lambda line: f"{file}:{line}")
        value = document.read(document.root, path=())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 text (byte {error.start}). Is it a run file?"
        ) from None
    except YAMLError as error:
        line, reason = _explained(error)
        raise ConfigError(f"{file}{f':{line}' if line else ''}: not YAML: {reason}.") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{document.origin(document.root.start_mark.line + 1 if document.root else 1)}: "
            "expected sections (run:, model:, batch: ...), found "
            f"{'nothing' if value is None else 'something else'}."
        )
    return document


def read_overrides(overrides: Sequence[str]) -> Document:
    """Read `section.key=value` arguments; a later one wins over an earlier one and its parts."""
    document = Document()
    for argument in overrides:
        name, equals, text = argument.partition("=")
        path = tuple(name.strip().replace("-", "_").split("."))
        if not (equals and len(path) > 1 and all(path)):
            document.problems.append(
                f"{COMMAND_LINE}: {without_secrets(argument)!r} is not an option or a setting. "
                "Write settings as section.key=value, for example optimizer.lr=2e-4."
            )
            continue
        settings = without_parts(document.settings, [path])
        try:
            typed = Document(text, origin=lambda line: COMMAND_LINE)
            value = typed.read(typed.root, path=path)
            if text[typed.root.end_mark.index if typed.root else 0 :].strip():
                raise YAMLError("a comment (#) or a mark of the document's end follows the value")
            typed.settings[path] = Setting(value, text.strip(), COMMAND_LINE)
        except YAMLError as error:
            stated = without_secrets(f"{'.'.join(path)} = {text!r}")
            document.problems.append(
                f"{COMMAND_LINE}: {stated}: not YAML: {_explained(error)[1]}. "
                "Put the value in quotes."
            )
            continue
        document.settings = settings | typed.settings
        document.problems += typed.problems
    return document


def without_parts(
    settings: Mapping[SettingPath, Setting], replaced: Collection[SettingPath]
) -> dict[SettingPath, Setting]:
    """Return the settings without those in a group that was replaced as a whole."""
    return {
        path: setting
        for path, setting in settings.items()
        if not any(path[:length] in replaced for length in range(2, len(path)))
    }


def nested(settings: Mapping[SettingPath, Setting]) -> dict[str, Any]:
    """Return the settings as nested mappings, for pydantic."""
    values: dict[str, Any] = {}
    for path, setting in settings.items():
        section, inside = settings.get(path[:1]), values
        if len(path) > 1 and section and not section.is_group and section.value is not None:
            continue  # a value in place of a section is reported once
        for name in path[:-1]:
            if not isinstance(inside.get(name), dict):
                inside[name] = {}
            inside = inside[name]
        if setting.is_group or (len(path) == 1 and setting.value is None):  # only comments in it
            inside.setdefault(path[-1], {})
        else:
            inside[path[-1]] = setting.value
    return values
