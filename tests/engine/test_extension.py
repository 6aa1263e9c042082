from __future__ import annotations

from pathlib import Path

import pytest

from refocused.config.optimization import ScheduleConfig
from refocused.engine.schedule import planned_steps, rate_change

COSINE = ScheduleConfig(kind="cosine", floor_fraction=0.1)


def change(step: int, planned: int | None, total: int, schedule: ScheduleConfig) -> str | None:
    return rate_change(step, planned=planned, total_steps=total, peak=1e-3, schedule=schedule)


def test_a_finished_cosine_that_is_extended_rises_and_says_so() -> None:
    text = change(500, 500, 1000, COSINE)
    assert text is not None
    # Half way down from 1e-3 to 1e-4 is 5.5e-4; the last step was at the floor.
    assert "laid out for 500 steps and is now for 1,000" in text
    assert "from 1.00e-04 to 5.50e-04 at once" in text
    assert "schedule.kind=constant" in text


def test_a_run_that_is_cut_short_falls_and_needs_no_way_out() -> None:
    text = change(500, 1000, 600, COSINE)
    assert text is not None and "at once" in text and "constant" not in text


@pytest.mark.parametrize(
    ("step", "planned", "total", "schedule"),
    [
        (500, 500, 500, COSINE),
        (0, 500, 1000, COSINE),
        (500, None, 1000, COSINE),
        (500, 500, 1000, ScheduleConfig(kind="constant")),
        (10, 1000, 1010, COSINE),
    ],
)
def test_what_does_not_move_the_rate_is_not_mentioned(
    step: int, planned: int | None, total: int, schedule: ScheduleConfig
) -> None:
    assert change(step, planned, total, schedule) is None


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        ("run: {name: a, steps: 500}", 500),
        ("run: {steps: many}", None),
        ("", None),
        ("[1", None),
        ("3", None),
    ],
)
def test_the_steps_that_were_planned_are_in_the_steps_own_run_file(
    tmp_path: Path, content: str, steps: int | None
) -> None:
    (tmp_path / "run.yaml").write_text(content)
    assert planned_steps(tmp_path / "run.yaml") == steps
    assert planned_steps(tmp_path / "none.yaml") is None
