from __future__ import annotations

import pytest

from refocused.train.step.stopping import StopReason, budget_limit, time_limit


@pytest.mark.parametrize(
    ("now", "reason"),
    [(100.0, StopReason.NONE), (1899.0, StopReason.NONE), (1900.0, StopReason.TIME_LIMIT)],
)
def test_a_session_may_take_its_hours(now: float, reason: StopReason) -> None:
    assert time_limit(0.5, began_seconds=100.0, clock=lambda: now)() is reason


def test_the_budget_warns_twice_and_then_stops() -> None:
    spent, said = [0.0], list[str]()
    budget = budget_limit(200.0, spent_usd=lambda: spent[0], warn=said.append)
    for dollars in (0.0, 159.0, 160.0, 170.0, 189.9):
        spent[0] = dollars
        assert budget() is StopReason.NONE
    assert [text.partition(".00,")[0] for text in said] == ["The run has cost $160"]
    assert "$160.00, 80% of cost.budget_usd=200.00" in said[0]
    spent[0] = 190.0
    assert budget() is StopReason.NONE
    assert len(said) == 2 and "95%" in said[1]
    for dollars in (200.0, 201.0):
        spent[0] = dollars
        assert budget() is StopReason.BUDGET
    assert len(said) == 2


def test_a_run_that_resumes_near_its_end_is_warned_once() -> None:
    said = list[str]()
    budget = budget_limit(100.0, spent_usd=lambda: 96.0, warn=said.append)
    assert [budget(), budget()] == [StopReason.NONE] * 2
    assert len(said) == 1
