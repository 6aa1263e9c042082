"""Saying in a person's words what a setting wants."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

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
