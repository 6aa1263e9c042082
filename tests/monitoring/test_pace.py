from __future__ import annotations

from typing import Any

from refocused.monitoring.pace import Pace, measured_pace


def steps(first: int, last: int, each: float, **more: float) -> dict[str, Any]:
    """An interval whose steps took `each` seconds: most of it computing."""
    total = (last - first) * each
    uses = {"forward_backward_seconds": total - 2.0, "data_wait_seconds": 1.5, "other_seconds": 0.5}
    return {"kind": "time", "first_step": first, "step": last, **uses, **more}


def session(step: int) -> dict[str, Any]:
    return {"kind": "session", "step": step, "start_up_seconds": 100.0}


def test_what_is_left_by_hand() -> None:
    pace = Pace(step_seconds=2.0, validation_seconds=5.0, save_seconds=7.0)
    assert pace.seconds_left(steps=10, validations=3, saves=2) == 20.0 + 15.0 + 14.0
    assert Pace(step_seconds=2.0).seconds_left(steps=10, validations=3, saves=2) == 20.0
    assert Pace().seconds_left(steps=10, validations=0, saves=0) is None


def test_a_step_is_the_median_without_the_warm_up_validations_and_saves() -> None:
    found = measured_pace(
        [
            session(0),
            steps(0, 10, 30.0),
            steps(10, 20, 2.0, save_stall_seconds=60.0),
            steps(20, 30, 9.0),
            steps(30, 40, 3.0, validation_seconds=40.0),
            {"kind": "time", "first_step": 40, "step": 40, "ending_seconds": 9.0},
        ]
    )
    assert found.step_seconds == 3.0


def test_samples_take_their_time_too() -> None:
    sample = {"kind": "sample", "step": 20, "text": "sample 20", "seconds": 4.0}
    found = measured_pace([session(0), steps(10, 20, 2.0), sample])
    assert found.seconds_left(steps=10, validations=0, saves=0, samples=3) == 20.0 + 12.0


def test_the_warm_up_counts_until_there_is_more() -> None:
    assert measured_pace([session(100), steps(100, 105, 8.0)]).step_seconds == 8.0


def test_a_session_on_other_gpus_forgets_the_pace_of_the_one_before() -> None:
    before = [session(0), steps(0, 10, 30.0), steps(10, 20, 2.0)]
    assert measured_pace([*before, session(15)]).step_seconds == 2.0  # nothing newer is known
    resumed = [*before, session(15), steps(15, 25, 20.0)]
    assert measured_pace(resumed).step_seconds == 20.0
    assert measured_pace([*resumed, steps(25, 35, 4.0)]).step_seconds == 4.0


def test_validations_and_saves_are_medians_of_their_own_records() -> None:
    found = measured_pace(
        [
            session(0),
            steps(0, 10, 2.0),
            *({"kind": "save", "step": 1, "save_stall_seconds": s} for s in (3.0, 90.0, 4.0)),
            *({"kind": "validation", "step": 1, "seconds": s} for s in (50.0, 10.0, 11.0)),
        ]
    )
    assert (found.validation_seconds, found.save_seconds) == (11.0, 4.0)


def test_damaged_records_are_passed_over() -> None:
    damaged: list[dict[str, Any]] = [
        {},
        {"kind": "time", "step": "7"},
        {"kind": "time", "step": 7},
        {"kind": "save", "step": 3, "save_stall_seconds": None},
    ]
    assert measured_pace(damaged) == Pace()
