"""The base of every configuration section: frozen, strict about names, lenient about `3e-4`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic


class Section(pydantic.BaseModel):
    """A frozen group of settings that refuses unknown names."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, serialize_by_alias=True
    )


def _number(value: Any) -> Any:
    """Turn text such as `3e-4` into a float: YAML 1.1 reads it as text."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("a number is wanted") from None
    return value


def _whole(value: Any) -> Any:
    """Accept 12, "12", 1e6 and "1e6" as whole numbers, and nothing that is not whole."""
    number = _number(value)
    if isinstance(number, float):
        if not number.is_integer():
            raise ValueError("a whole number is wanted")
        return int(number)
    return number


def _count_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    number = _whole(value)
    if isinstance(number, int) and number >= 1:
        return number
    raise ValueError("a whole number of at least 1 is wanted, or auto")


Number = Annotated[float, pydantic.BeforeValidator(_number), pydantic.AllowInfNan(False)]
Positive = Annotated[Number, pydantic.Field(gt=0)]
NotNegative = Annotated[Number, pydantic.Field(ge=0)]
Fraction = Annotated[Number, pydantic.Field(ge=0, le=1)]
DecayRate = Annotated[Number, pydantic.Field(ge=0, lt=1)]
Whole = Annotated[int, pydantic.BeforeValidator(_whole), pydantic.Strict()]
Count = Annotated[Whole, pydantic.Field(ge=1)]
CountOrAuto = Annotated[int | Literal["auto"], pydantic.BeforeValidator(_count_or_auto)]
CountOrZero = Annotated[Whole, pydantic.Field(ge=0)]
