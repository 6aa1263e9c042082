from __future__ import annotations

import pytest

from refocused.monitoring.throughput import Throughput


class Watch:
    """A clock that a test moves, with a Throughput on it."""

    def __init__(self) -> None:
        self.now = 50.0
        self.throughput = Throughput(lambda: self.now)

    def spend(self, seconds: float, activity: str = "step") -> float:
        self.now += seconds
        return self.throughput.lap(activity)  # type: ignore[arg-type]


def test_a_lap_is_the_time_since_the_last_one() -> None:
    watch = Watch()
    assert watch.spend(3.0) == 3.0
    assert watch.spend(5.0, "save") == 5.0
    assert watch.throughput.session_seconds == 8.0


def test_nothing_is_known_before_the_first_step() -> None:
    watch = Watch()
    watch.spend(5.0, "validation")
    assert watch.throughput.step_seconds is None
    assert watch.throughput.seconds_left(steps=3, validations=0, saves=0) is None


def test_a_step_is_the_median_of_steps_alone() -> None:
    watch = Watch()
    for seconds in (2.0, 3.0, 40.0):
        watch.spend(seconds)
        watch.spend(100.0, "validation")
        watch.spend(200.0, "save")
    assert watch.throughput.step_seconds == 3.0


def test_the_first_ten_steps_count_only_until_there_are_others() -> None:
    watch = Watch()
    for _ in range(10):
        watch.spend(9.0)
    assert watch.throughput.step_seconds == 9.0
    watch.spend(1.0)
    assert watch.throughput.step_seconds == 1.0


def test_the_median_is_of_the_last_fifty_steps() -> None:
    watch = Watch()
    for _ in range(10 + 30):
        watch.spend(8.0)
    for _ in range(26):
        watch.spend(2.0)
    assert watch.throughput.step_seconds == 2.0  # 24 slow, 26 fast
    watch.spend(8.0)
    assert watch.throughput.step_seconds == 2.0
    for _ in range(25):
        watch.spend(8.0)
    assert watch.throughput.step_seconds == 8.0  # 26 slow again, 24 fast


def test_what_a_step_still_takes_belongs_to_it() -> None:
    watch = Watch()
    for _ in range(12):
        watch.spend(1.0)
        watch.now += 4.0
        assert watch.throughput.lap("step", continued=True) == 4.0
    assert watch.throughput.step_seconds == 5.0
    assert watch.throughput.laps["step"] == 60.0


def test_the_time_left_holds_validations_and_saves_at_their_own_speed() -> None:
    watch = Watch()
    watch.spend(2.0)
    left = watch.throughput.seconds_left(steps=10, validations=3, saves=2)
    assert left == 20.0  # neither has been measured yet
    watch.spend(5.0, "validation")
    watch.spend(7.0, "validation")
    watch.spend(30.0, "save")
    left = watch.throughput.seconds_left(steps=10, validations=3, saves=2)
    assert left == pytest.approx(10 * 2.0 + 3 * 6.0 + 2 * 30.0)
