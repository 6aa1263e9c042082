"""Parse YAML of unknown origin: limited size, depth and aliases, whole characters."""

from __future__ import annotations

from typing import Any

import yaml

from refocused.system.strict_json import MOST_DIGITS, MalformedError

LARGEST_CHARACTERS = 200_000  # PyYAML takes about 5 s for so many
DEEPEST = 40  # levels, aliases followed: PyYAML takes up to ten calls for each
MOST_NODES = 100_000  # aliases followed, as a recursive reader meets them


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, whose every refusal is a `yaml.YAMLError`."""

    def __init__(self, text: str) -> None:
        """Take a text.

        Raises:
            yaml.YAMLError: It is too long, or has characters that YAML does not allow.
        """
        if len(text) > LARGEST_CHARACTERS:
            raise yaml.YAMLError(
                f"it has {len(text):,} characters, and at most {LARGEST_CHARACTERS:,} are read"
            )
        super().__init__(text)
        self._level = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # levels and nodes, aliases followed

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and refuse one that is too deep or too large."""
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
        """Construct a value; PyYAML's own constructors raise what their conversions raise."""
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
                raise OverflowError
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
            kind = node.tag.rpartition(":")[2]
            shown = f"{node.value!r:.40}" if isinstance(node.value, str) else "this"
            raise _refusal(f"{shown} is no {kind} that can be read", node.start_mark) from None
        return value

    def _measured(self, node: yaml.Node) -> tuple[int, int]:
        """Return the levels and nodes of a node whose children are composed.

        Raises:
            yaml.YAMLError: They are too many, or it contains itself.
        """
        if isinstance(node, yaml.ScalarNode) and not _is_whole(node.value):
            raise _refusal("it holds half a character (a lone surrogate)", node.start_mark)
        children = _children(node)
        if any(child not in self._sizes for child in children):
            raise _refusal("an alias stands for what contains it", node.start_mark)
        levels = 1 + max((self._sizes[child][0] for child in children), default=0)
        nodes = 1 + sum(self._sizes[child][1] for child in children)
        if levels > DEEPEST or nodes > MOST_NODES:
            raise _refusal("its aliases stand for too much", node.start_mark)
        return levels, nodes


def parse_yaml(content: bytes | str) -> Any:
    """Parse one YAML document.

    Raises:
        MalformedError: It is no YAML or no UTF-8, too long or too deep, or has aliases that grow
            without bounds.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return StrictLoader(text).get_single_data()
    except UnicodeDecodeError as error:
        raise MalformedError(f"its byte {error.start:,} is no UTF-8") from None
    except yaml.YAMLError as error:
        line = line_of(error)
        raise MalformedError(f"{f'line {line}: ' if line else ''}{reason_of(error)}") from None


def parse_yaml_mapping(content: bytes | str) -> dict[str, Any]:
    """Parse a YAML mapping of names; an empty document is an empty one; raises as `parse_yaml`."""
    value = parse_yaml(content)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise MalformedError("it holds no settings by name")
    return value


def line_of(error: yaml.YAMLError) -> int | None:
    """Return the line where PyYAML gave up, from 1; None: it does not say."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return mark.line + 1 if mark else None


def reason_of(error: yaml.YAMLError) -> str:
    """Return why PyYAML gave up, on one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        return f"{error.context}, {error.problem}" if error.context else str(error.problem)
    return " ".join(str(error).split())


def _refusal(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
