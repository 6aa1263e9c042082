"""The base of every section of a run file: frozen, strict about names, strict about types."""

import math
import re
from typing import Annotated, Any, Literal

import pydantic

from refocused.system.errors import ConfigError, local_path


class Scalar(str):
    """A value of a run file as it was written, so that a run may be named 1121."""

    value: Any  # what YAML makes of it

    __slots__ = ("value",)


class Section(pydantic.BaseModel):
    """A frozen group of settings without unknown names."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_empty(cls, values: Any) -> Any:
        return {} if values is None else values  # null if every line of it is a comment


def setting(default: Any, example: str, **limits: Any) -> Any:
    """Return a setting with a default; the example, as YAML, is for the annotated run file."""
    return pydantic.Field(default=default, examples=[example], **limits)


def as_yaml(value: Any) -> Any:
    """Return what YAML makes of a value, whose scalars may be `Scalar`."""
    if isinstance(value, list):
        return [as_yaml(part) for part in value]
    if isinstance(value, dict):
        return {name: as_yaml(part) for name, part in value.items()}
    return value.value if isinstance(value, Scalar) else value


def _number(value: Any) -> Any:
    value = as_yaml(value)
    if isinstance(value, str):
        raise ValueError("expected a number such as 1000 or 2.5e-4, without quotes")
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _whole(value: Any) -> Any:
    """Accept 1e6 besides what pydantic takes."""
    value = _number(value)
    if isinstance(value, int | float) and 2**63 <= abs(value) < math.inf:
        raise ValueError("expected a number of at most 63 bits")
    return value


def number_or_word(value: Any) -> Any:
    """Return a number as such and text as text; `true`, which equals 1, stays text, too."""
    number = as_yaml(value)
    return value if isinstance(number, bool) else number


Flag = Annotated[bool, pydantic.Strict(), pydantic.BeforeValidator(as_yaml)]
Number = Annotated[float, pydantic.BeforeValidator(_number), pydantic.AllowInfNan(False)]
Positive = Annotated[Number, pydantic.Field(gt=0)]
NotNegative = Annotated[Number, pydantic.Field(ge=0)]
Fraction = Annotated[Number, pydantic.Field(ge=0, le=1)]
DecayRate = Annotated[Number, pydantic.Field(ge=0, lt=1)]
Whole = Annotated[int, pydantic.BeforeValidator(_whole)]
Count = Annotated[Whole, pydantic.Field(ge=1)]
CountOrZero = Annotated[Whole, pydantic.Field(ge=0)]


def _expanded(text: str) -> str:
    try:
        return str(local_path(text)) if text.startswith("~") else text
    except ConfigError as error:
        raise ValueError(str(error)) from None


# Every setting that may name a local file or folder: `~` is the home folder.
PathText = Annotated[str, pydantic.AfterValidator(_expanded)]


def matching(pattern: str, problem: str) -> pydantic.AfterValidator:
    """Return a check that a text matches a pattern; `problem` is the error message."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(problem)
        return value

    return pydantic.AfterValidator(check)


def _count_or(word: str, *, least: int) -> pydantic.PlainValidator:
    whole: Any = Annotated[Whole, pydantic.Field(ge=least)]
    count: pydantic.TypeAdapter[int] = pydantic.TypeAdapter(whole)

    def check(value: object) -> str | int:
        if value == word:
            return word
        try:
            return count.validate_python(value)
        except pydantic.ValidationError:
            raise ValueError(f"expected a whole number of at least {least}, or {word}") from None

    return pydantic.PlainValidator(check, json_schema_input_type=whole | Literal[word])


CountOrAuto = Annotated[int | Literal["auto"], _count_or("auto", least=1)]
TwoOrAll = Annotated[int | Literal["all"], _count_or("all", least=2)]
