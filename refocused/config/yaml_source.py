"""Read untrusted YAML within limits, and run files with the line of every setting."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from refocused.config.section import Scalar
from refocused.system.errors import ConfigError
from refocused.system.strict_json import MAX_DIGITS, MalformedError

LARGEST_CHARACTERS = 200_000  # PyYAML takes about 5 s for so many
DEEPEST = 40  # levels with aliases followed: PyYAML makes up to ten calls for each
MOST_NODES = 100_000  # with aliases followed
COMMAND_LINE = "command line"
SettingPath = tuple[str, ...]


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits; it raises only `yaml.YAMLError`."""

    def __init__(self, text: str) -> None:
        if len(text) > LARGEST_CHARACTERS:
            raise yaml.YAMLError(
                f"it has {len(text):,} characters; at most {LARGEST_CHARACTERS:,} are allowed"
            )
        super().__init__(text)
        self.text = text
        self._level = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # levels and nodes, aliases followed

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._level += 1
        if self._level > DEEPEST:
            raise _refusal(f"it nests over {DEEPEST} levels", event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[node] = self._measured(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
                raise OverflowError
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
            kind = node.tag.rpartition(":")[2]
            shown = f"{node.value!r:.40}" if isinstance(node.value, str) else "this"
            raise _refusal(f"{shown} is not a valid {kind}", node.start_mark) from None
        return value

    def _measured(self, node: yaml.Node) -> tuple[int, int]:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        elif re.search("[\ud800-\udfff]", node.value):
            raise _refusal("it contains a lone surrogate", node.start_mark)
        if any(child not in self._sizes for child in children):
            raise _refusal("an alias contains itself", node.start_mark)
        levels = 1 + max((self._sizes[child][0] for child in children), default=0)
        nodes = 1 + sum(self._sizes[child][1] for child in children)
        if levels > DEEPEST or nodes > MOST_NODES:
            raise _refusal("its aliases expand too much", node.start_mark)
        return levels, nodes


def _refusal(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def parse_yaml(content: bytes | str) -> Any:
    """Parse one YAML document.

    Raises:
        MalformedError: It is not YAML or UTF-8, too long or too deep, or its aliases expand too
            much.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return _StrictLoader(text).get_single_data()
    except UnicodeDecodeError as error:
        raise MalformedError(f"byte {error.start:,} is not UTF-8") from None
    except yaml.YAMLError as error:
        line, reason = _explained(error)
        raise MalformedError(f"{f'line {line}: ' if line else ''}{reason}") from None


def parse_yaml_mapping(content: bytes | str) -> dict[str, Any]:
    """Parse a YAML mapping with text keys; an empty document is an empty mapping."""
    value = parse_yaml(content)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise MalformedError("it is not a mapping of names")
    return value


def _explained(error: yaml.YAMLError) -> tuple[int | None, str]:
    """Return the line of a YAML error, if known, and its reason on one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return None, " ".join(str(error).split())
    mark = error.problem_mark
    reason = f"{error.context}, {error.problem}" if error.context else str(error.problem)
    return mark.line + 1 if mark else None, reason


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written."""

    value: Any  # what YAML makes of it
    plain: Any  # the same with every scalar as a `Scalar`, for settings that are text
    text: str  # the characters as written
    origin: str  # `file:line`, or `command line`

    @property
    def is_group(self) -> bool:
        """Whether it is a mapping; its settings have entries of their own."""
        return isinstance(self.plain, dict)


class _RunLoader(_StrictLoader):
    """A loader that reads `3e-4` as a number and a date as text."""

    file: Path | None = None  # None: the command line

    def origin(self, node: yaml.Node) -> str:
        return COMMAND_LINE if self.file is None else f"{self.file}:{node.start_mark.line + 1}"

    def plain(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(child) for child in node.value]
        if isinstance(node, yaml.MappingNode):
            return {str(key.value): self.plain(child) for key, child in node.value}
        if node.tag == "tag:yaml.org,2002:null":
            return None
        scalar = Scalar(node.value)
        scalar.value = self.construct_object(node)
        return scalar


_RunLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RunLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


@dataclasses.dataclass(slots=True)
class Document:
    """Settings by path, such as (section, key), and problems of their form, one line each."""

    settings: dict[SettingPath, Setting] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def _add(self, path: SettingPath, node: yaml.Node, origin: str, loader: _RunLoader) -> None:
        """Add a setting and, if it is a mapping, each of its settings."""
        if path:
            value = loader.construct_object(node, deep=True) if len(path) > 1 else None
            text = loader.text[node.start_mark.index : node.end_mark.index].strip()
            plain = {} if isinstance(node, yaml.MappingNode) else loader.plain(node)
            self.settings[path] = Setting(value, plain, text, origin)
        if not isinstance(node, yaml.MappingNode):
            return
        origins: dict[str, str] = {}
        for key_node, value_node in node.value:
            key, where = str(key_node.value), loader.origin(key_node)
            if key in origins:  # YAML itself would take the second one
                line = "" if loader.file is None else origins[key].rpartition(":")[2]
                first = f", first on line {line}" if line else ""
                name = ".".join((*path, key))
                self.problems.append(f"{where}: {name} is set twice{first}. Keep one.")
                continue
            origins[key] = where
            try:
                self._add((*path, key), value_node, where, loader)
            except yaml.YAMLError as error:
                self.problems.append(f"{loader.file}{_place(error)}")


def _place(error: yaml.YAMLError) -> str:
    line, reason = _explained(error)
    return f"{f':{line}' if line else ''}: not YAML: {reason}."


def read_document(file: Path) -> Document:
    """Read a run file; raise ConfigError if it is not text, not YAML or not a mapping."""
    try:
        loader = _RunLoader(file.read_text(encoding="utf-8"))
        loader.file = file
        root = loader.get_single_node()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 text (byte {error.start}). Is it a run file?"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}{_place(error)}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{loader.origin(root) if root else f'{file}:1'}: expected sections (run:, model:, "
            f"batch: ...), found {'something else' if root else 'nothing'}."
        )
    document = Document()
    document._add((), root, "", loader)
    return document


def read_overrides(overrides: Sequence[str]) -> Document:
    """Read `section.key=value` arguments; a later one wins over an earlier one and its parts."""
    document = Document()
    for argument in overrides:
        name, equals, text = argument.partition("=")
        path = tuple(name.strip().replace("-", "_").split("."))
        if not (equals and len(path) > 1 and all(path)):
            document.problems.append(
                f"{COMMAND_LINE}: {argument!r} is not an option or a setting. Write settings as "
                "section.key=value, for example optimizer.lr=2e-4."
            )
            continue
        document.settings = without_parts(document.settings, [path])
        try:
            loader = _RunLoader(text)
            if node := loader.get_single_node():
                document._add(path, node, COMMAND_LINE, loader)
            else:
                document.settings[path] = Setting(None, None, "", COMMAND_LINE)
        except yaml.YAMLError as error:
            document.problems.append(
                f"{COMMAND_LINE}: {'.'.join(path)} = {text!r}: not YAML: {_explained(error)[1]}. "
                "Put the value in quotes."
            )
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
        if len(path) > 1 and section and not section.is_group and section.plain is not None:
            continue  # a value in place of a section is reported once
        for name in path[:-1]:
            if not isinstance(inside.get(name), dict):
                inside[name] = {}
            inside = inside[name]
        is_empty = len(path) == 1 and setting.plain is None  # every line is a comment
        inside[path[-1]] = {} if setting.is_group or is_empty else setting.plain
    return values
