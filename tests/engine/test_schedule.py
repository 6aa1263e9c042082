import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refocused.config.optimization import ScheduleConfig
from refocused.engine.schedule import learning_rate, planned_steps, rate_change


def rates(schedule: ScheduleConfig, total: int, *, peak: float = 1.0) -> list[float]:
    return [
        learning_rate(step, peak=peak, total_steps=total, schedule=schedule)
        for step in range(total)
    ]


def test_cosine_by_hand() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=4, floor_fraction=0.1)
    rate = rates(schedule, 12, peak=6e-4)
    assert rate[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])  # a quarter a step
    assert rate[4] == pytest.approx(6e-4)  # the peak lasts one step
    assert rate[6] == pytest.approx(6e-5 + 5.4e-4 * (1 + math.sqrt(0.5)) / 2)  # a quarter down
    assert rate[8] == pytest.approx(6e-5 + 5.4e-4 / 2)  # half way down
    assert rate[11] == pytest.approx(6e-5 + 5.4e-4 * (1 + math.cos(math.pi * 7 / 8)) / 2)


def test_cosine_stays_at_its_floor_after_the_end() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, floor_fraction=0.1)
    for step in (100, 150):
        rate = learning_rate(step, peak=3.0, total_steps=100, schedule=schedule)
        assert rate == pytest.approx(0.3)


def test_constant_rises_and_stays() -> None:
    schedule = ScheduleConfig(kind="constant", warmup_steps=2, floor_fraction=0.1)
    assert rates(schedule, 6) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_one_cycle_rises_along_a_cosine() -> None:
    schedule = ScheduleConfig(kind="one_cycle", warmup_steps=4, floor_fraction=0.0)
    rate = rates(schedule, 8)
    quarter = (1 - math.sqrt(0.5)) / 2
    assert rate[:4] == pytest.approx([quarter, 0.5, 1 - quarter, 1.0])
    assert rate[4:] == pytest.approx([1.0, 1 - quarter, 0.5, quarter])


def test_warm_restarts_by_hand() -> None:
    schedule = ScheduleConfig(
        kind="warm_restarts", warmup_steps=2, floor_fraction=0.2, cycle_steps=2, cycle_growth=2.0
    )
    low, high = 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2
    expected = [0.5, 1.0, 1.0, 0.6, 1.0, high, 0.6, low, 1.0]  # warmup, 2 steps, 4 steps, 8 steps
    assert rates(schedule, 9) == pytest.approx(expected)


SHAPES = st.builds(
    dict, total=st.integers(2, 200), share=st.floats(0, 1), floor_fraction=st.floats(0, 1)
)


@given(SHAPES, st.sampled_from(["cosine", "one_cycle", "constant"]))
def test_it_rises_through_the_warmup_and_never_again(shape: dict[str, float], kind: str) -> None:
    total = int(shape["total"])
    warmup = int(shape["share"] * total)
    schedule = ScheduleConfig(
        kind=kind,  # type: ignore[arg-type]
        warmup_steps=warmup,
        floor_fraction=shape["floor_fraction"],
    )
    rate = rates(schedule, total)
    rise, fall = rate[:warmup], rate[max(0, warmup - 1) :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(0 < value <= 1 for value in rate)
    assert max(rate) == 1.0
    assert all(value >= shape["floor_fraction"] - 1e-12 for value in rate[warmup:])


COSINE = ScheduleConfig(kind="cosine", floor_fraction=0.1)


def change(step: int, planned: int | None, total: int, schedule: ScheduleConfig) -> str | None:
    return rate_change(step, planned=planned, total_steps=total, peak=1e-3, schedule=schedule)


def test_extending_a_finished_cosine_is_reported() -> None:
    text = change(500, 500, 1000, COSINE)
    assert text is not None
    # Half way down from 1e-3 to 1e-4 is 5.5e-4; the last step was at the floor.
    assert "planned for 500 steps and now has 1,000" in text
    assert "jumps from 1.00e-04 to 5.50e-04" in text
    assert "schedule.kind=constant" in text


def test_shortening_a_run_is_reported_without_a_remedy() -> None:
    text = change(500, 1000, 600, COSINE)
    assert text is not None and "jumps from 5.51e-04 to 1.60e-04" in text and "constant" not in text


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
def test_changes_that_do_not_affect_the_rate_are_not_reported(
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
def test_planned_steps_are_read_from_the_checkpoints_run_file(
    tmp_path: Path, content: str, steps: int | None
) -> None:
    (tmp_path / "run.yaml").write_text(content)
    assert planned_steps(tmp_path / "run.yaml") == steps
    assert planned_steps(tmp_path / "none.yaml") is None
