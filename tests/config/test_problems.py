from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

from refocused.config.suggestions import wanted


def findings(annotation: Any, value: Any) -> list[str]:
    with pytest.raises(pydantic.ValidationError) as failure:
        pydantic.TypeAdapter(annotation).validate_python(value)
    return [wanted(error) for error in failure.value.errors()]


def test_limits_are_written_without_decimals() -> None:
    assert findings(pydantic.confloat(gt=0.0), -1) == ["more than 0 is wanted"]
    assert findings(pydantic.confloat(lt=0.5), 1) == ["less than 0.5 is wanted"]


def test_choices_are_listed_with_the_near_one() -> None:
    [finding] = findings(Literal["cpu", "nvme", "none"], "nvm")
    assert finding == "one of cpu, nvme, none is wanted. Did you mean nvme?"
    assert findings(Literal["cpu", "nvme"], 7) == ["one of cpu, nvme is wanted"]


def test_a_finding_without_words_of_ours_keeps_pydantics() -> None:
    [finding] = findings(bytes, 7)
    assert finding == "input should be a valid bytes"
