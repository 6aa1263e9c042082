from __future__ import annotations

from typing import Any

import pydantic
import pytest

from refocused.config.section import Count, Number, Section


class Sample(Section):
    number: Number = 1.0
    count: Count = 1


@pytest.mark.parametrize(("given", "taken"), [("3e-4", 3e-4), (2, 2.0), ("2", 2.0), (0.5, 0.5)])
def test_numbers_take_text_that_is_a_number(given: Any, taken: float) -> None:
    assert Sample(number=given).number == taken


@pytest.mark.parametrize("given", [True, False, "abc", None, [1], "nan", "inf"])
def test_numbers_refuse_the_rest(given: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        Sample(number=given)


@pytest.mark.parametrize(("given", "taken"), [(12, 12), ("12", 12), (1e6, 10**6), ("1e6", 10**6)])
def test_whole_numbers_take_every_way_to_write_them(given: Any, taken: int) -> None:
    assert Sample(count=given).count == taken


@pytest.mark.parametrize("given", [True, 2.5, "2.5", 0, -1, "inf", None])
def test_whole_numbers_refuse_the_rest(given: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        Sample(count=given)


def test_sections_are_frozen_and_refuse_unknown_names() -> None:
    with pytest.raises(pydantic.ValidationError):
        Sample().number = 2.0
    with pytest.raises(pydantic.ValidationError):
        Sample.model_validate({"numbre": 1})
