"""Parse JSON of unknown origin: limited depth and numbers, whole characters."""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100  # levels; what was parsed may be walked by recursion
MOST_DIGITS = 100  # of an integer: the product of three of them still fits a float
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedError(ValueError):
    """A text is not what it has to be; the message says why, without the file's name."""


def parse_json(
    content: bytes | str, *, unique_names: bool = False, half_characters: bool = False
) -> Any:
    """Parse one JSON value.

    Args:
        content: UTF-8, or text.
        unique_names: Refuse an object with a name twice, of which JSON takes the last.
        half_characters: Keep lone surrogates, which JSON can spell and UTF-8 cannot hold.

    Raises:
        MalformedError: It is no JSON or no UTF-8, nests over 100 levels, has an integer of over
            100 digits, a lone surrogate, or a name twice.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = (_UNIQUE_NAMES if unique_names else _DECODER).decode(text)
        if text.count("[") + text.count("{") > DEEPEST:
            _check_depth(value)
        if not half_characters and _HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise MalformedError(f"it nests over {DEEPEST} levels") from None
    except UnicodeEncodeError:
        raise MalformedError("it holds half a character (a lone surrogate)") from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"its byte {error.start:,} is no UTF-8") from None
    except json.JSONDecodeError as error:
        raise MalformedError(str(error)) from None
    return value


def parse_json_object(content: bytes | str) -> dict[str, Any]:
    """Parse one JSON object; raises as `parse_json`, and for any other value."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise MalformedError(f"it holds {type(value).__name__} where an object is wanted")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise MalformedError(f"it has an integer of {len(digits):,} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise MalformedError(f"{name} is set twice")
        content[name] = value
    return content


# Made once: json.loads would make one for each call.
_DECODER = json.JSONDecoder(parse_int=_whole_number)
_UNIQUE_NAMES = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_unique)


def _check_depth(value: object) -> None:
    """Refuse a value that nests too deep; a scalar is a level below what holds it."""
    level = [value]
    for _ in range(DEEPEST + 1):
        below: list[object] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        if not below:
            return
        level = below
    raise RecursionError
