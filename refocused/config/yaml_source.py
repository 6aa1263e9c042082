"""A YAML file or an override as settings that remember where they were written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from refocused.config.strict_yaml import StrictLoader, line_of, reason_of
from refocused.system.errors import ConfigError

COMMAND_LINE = "command line"
SettingPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One value as somebody wrote it.

    Attributes:
        value: What YAML makes of it.
        plain: The same with every scalar left as text, for settings that want text: a run may be
            named 1121.
        text: The characters as written.
        origin: `file:line`, or `command line`.
    """

    value: Any
    plain: Any
    text: str
    origin: str


@dataclasses.dataclass(slots=True)
class Document:
    """Names and their values, with everything that is wrong about their form.

    Attributes:
        settings: Values by (section, key); a group of settings has its own entry and one for each
            of its parts, (section, key, name), (section, key, name, key) and so on.
        sections: Where each section starts.
        not_groups: Where a section should be, but holds a single value.
        problems: One line each.
    """

    settings: dict[SettingPath, Setting] = dataclasses.field(default_factory=dict)
    sections: dict[str, str] = dataclasses.field(default_factory=dict)
    not_groups: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


class _Loader(StrictLoader):
    """YAML in which `3e-4` is a number and a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def read_document(file: Path) -> Document:
    """Read a run file.

    Raises:
        ConfigError: The file is not text, not YAML, or not a mapping at its top.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 text (byte {error.start}). Is it a run file?"
        ) from None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}{_place(error)}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{file}:{_line(root) if root else 1}: sections are wanted (run:, model:, batch: ...), "
            f"found {'nothing' if root is None else 'something else'}."
        )
    document = Document()
    for name, entry in _entries(root, inside="", file=file, problems=document.problems).items():
        document.sections[name] = entry.origin
        if isinstance(entry.node, yaml.MappingNode):
            _read_section(name, entry.node, document=document, loader=loader, file=file)
        elif not _is_null(entry.node):  # null: every line of the section is commented out
            document.not_groups[name] = entry.origin
    return document


def read_overrides(overrides: Sequence[str]) -> Document:
    """Read `section.key=value` arguments; a later one wins over an earlier one and its parts."""
    document = Document()
    for argument in overrides:
        name, equals, text = argument.partition("=")
        path = tuple(name.strip().replace("-", "_").split("."))
        if not (equals and len(path) > 1 and all(path)):
            document.problems.append(
                f"{COMMAND_LINE}: {argument!r} is not an override. Write section.key=value, "
                "for example optimizer.lr=3e-4."
            )
            continue
        document.sections[path[0]] = COMMAND_LINE
        document.settings = without_parts(document.settings, [path])
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            _add(path, node, COMMAND_LINE, document=document, loader=loader, file=None)
        except yaml.YAMLError as error:
            document.problems.append(
                f"{COMMAND_LINE}: {'.'.join(path)} = {text!r}: {_reason(error)} "
                "Put the value in quotes."
            )
    return document


def without_parts(
    settings: Mapping[SettingPath, Setting], replaced: Collection[SettingPath]
) -> dict[SettingPath, Setting]:
    """Return the settings but those that are part of a group that was replaced as a whole."""
    return {
        path: setting
        for path, setting in settings.items()
        if not any(path[:length] in replaced for length in range(2, len(path)))
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    node: yaml.Node
    origin: str


def _read_section(
    name: str, section: yaml.MappingNode, *, document: Document, loader: _Loader, file: Path
) -> None:
    entries = _entries(section, inside=f"{name}.", file=file, problems=document.problems)
    for key, entry in entries.items():
        try:
            _add((name, key), entry.node, entry.origin, document=document, loader=loader, file=file)
        except yaml.YAMLError as error:
            document.problems.append(f"{file}{_place(error)}")


def _add(
    path: SettingPath,
    node: yaml.Node | None,
    origin: str,
    *,
    document: Document,
    loader: _Loader,
    file: Path | None,
) -> None:
    """Add a setting and, of a group, each of its parts."""
    document.settings[path] = _setting(node, loader=loader, origin=origin)
    if isinstance(node, yaml.MappingNode):
        inside = f"{'.'.join(path)}."
        parts = _entries(node, inside=inside, file=file, problems=document.problems)
        for key, part in parts.items():
            _add((*path, key), part.node, part.origin, document=document, loader=loader, file=file)


def _entries(
    node: yaml.MappingNode, *, inside: str, file: Path | None, problems: list[str]
) -> dict[str, _Entry]:
    """Return a mapping's entries; YAML itself would let the second of two equal keys win."""
    entries: dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        origin = COMMAND_LINE if file is None else f"{file}:{_line(key_node)}"
        if key in entries:
            first = "" if file is None else f", first on line {_line_of(entries[key].origin)}"
            problems.append(f"{origin}: {inside}{key} is set twice{first}. Keep one.")
        else:
            entries[key] = _Entry(value_node, origin)
    return entries


def _setting(node: yaml.Node | None, *, loader: _Loader, origin: str) -> Setting:
    if node is None:
        return Setting(None, None, "", origin)
    value = loader.construct_object(node, deep=True)
    # A loader of text keeps it whole, in `buffer`.
    text = str(loader.buffer)[node.start_mark.index : node.end_mark.index].strip()
    return Setting(value, _plain(node), text, origin)


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child) for child in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(child) for key, child in node.value}
    return None if _is_null(node) else node.value


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _line_of(origin: str) -> str:
    return origin.rpartition(":")[2]


def _place(error: yaml.YAMLError) -> str:
    """Say where and why YAML gave up, as `:line: reason`."""
    line = line_of(error)
    return f"{f':{line}' if line else ''}: {_reason(error)}"


def _reason(error: yaml.YAMLError) -> str:
    return f"not YAML: {reason_of(error)}."
