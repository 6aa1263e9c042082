"""Parse untrusted JSON: depth and integers are limited, lone surrogates rejected."""

import json
import re
from typing import Any

MAX_DEPTH = 100  # levels; callers may walk the value recursively
MAX_DIGITS = 100  # of an integer: the product of three still fits a float
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedError(ValueError):
    """A text is malformed; the message says why, and leaves the file's name to the caller."""


def parse_json(
    content: bytes | str, *, unique_names: bool = False, lone_surrogates: bool = False
) -> Any:
    """Parse one JSON value.

    Args:
        content: UTF-8 bytes, or text.
        unique_names: Reject objects with a duplicate name, of which JSON keeps the last.
        lone_surrogates: Accept lone surrogates, which UTF-8 cannot encode.

    Raises:
        MalformedError: Invalid JSON or UTF-8, more than 100 levels, an integer of more than 100
            digits, a lone surrogate or a duplicate name.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = (_UNIQUE_NAMES if unique_names else _DECODER).decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(value)
        if not lone_surrogates and _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise MalformedError(f"it nests over {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise MalformedError("it holds a lone surrogate") from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"its byte {error.start:,} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise MalformedError(str(error)) from None
    return value


def parse_json_object(content: bytes | str) -> dict[str, Any]:
    """Parse one JSON object; raises as `parse_json`, and for a value that is no object."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise MalformedError(f"it holds {type(value).__name__} where an object is expected")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise MalformedError(f"it has an integer of {len(digits):,} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise MalformedError(f"{name} is set twice")
        content[name] = value
    return content


# Shared: json.loads would build a decoder in each call.
_DECODER = json.JSONDecoder(parse_int=_whole_number)
_UNIQUE_NAMES = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_unique)


def _check_depth(value: object) -> None:
    """Raise RecursionError for a value that is too deep; a scalar counts as a level."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[object] = []
        for part in level:
            if isinstance(part, dict | list):
                below += part.values() if isinstance(part, dict) else part
        if not below:
            return
        level = below
    raise RecursionError
