from __future__ import annotations

from refocused.config.batch_plan import BatchPlan
from refocused.metrics.throughput import RECENT, Activity, Forecast, Throughput, forecast

AHEAD: dict[Activity, int] = {"step": 10, "validation": 3, "save": 2, "ending": 1}


class Watch:
    """A clock that a test moves, with a Throughput on it."""

    def __init__(self, expected: Forecast | None = None) -> None:
        self.now = 50.0
        self.throughput = Throughput(lambda: self.now, forecast=expected)

    def spend(self, seconds: float, activity: Activity = "step") -> float:
        self.now += seconds
        return self.throughput.lap(activity)


def test_a_lap_is_the_time_since_the_last_one() -> None:
    watch = Watch()
    assert watch.spend(3.0) == 3.0
    assert watch.spend(5.0, "save") == 5.0
    assert watch.throughput.session_seconds == 8.0


def test_nothing_is_known_before_the_first_step() -> None:
    watch = Watch()
    watch.spend(5.0, "validation")
    assert watch.throughput.seconds_left({"step": 3}) is None


def test_a_step_is_the_mean_of_steps_alone_the_slow_ones_too() -> None:
    watch = Watch()
    for seconds in (2.0, 3.0, 40.0):
        watch.spend(seconds)
        watch.spend(100.0, "validation")
        watch.spend(200.0, "save")
    assert watch.throughput.seconds_left({"step": 2}) == 30.0


def test_the_first_ten_steps_count_only_until_there_are_others() -> None:
    watch = Watch()
    for _ in range(10):
        watch.spend(9.0)
    assert watch.throughput.seconds_left({"step": 1}) == 9.0
    watch.spend(1.0)
    assert watch.throughput.seconds_left({"step": 1}) == 1.0
    assert watch.throughput.steps == 11


def test_a_change_of_pace_takes_the_place_of_the_old_one() -> None:
    watch = Watch()
    for seconds in (8.0, 2.0):
        for _ in range(RECENT):
            watch.spend(seconds)
    assert watch.throughput.seconds_left({"step": 1}) == 2.0


def test_what_a_step_still_takes_belongs_to_it() -> None:
    watch = Watch()
    for _ in range(12):
        watch.spend(1.0)
        watch.now += 4.0
        assert watch.throughput.lap("step", continued=True) == 4.0
    assert watch.throughput.seconds_left({"step": 1}) == 5.0
    assert (watch.throughput.laps["step"], watch.throughput.steps) == (60.0, 12)


def test_the_time_left_holds_validations_and_saves_at_their_own_speed() -> None:
    watch, ahead = Watch(), AHEAD
    watch.spend(2.0)
    assert watch.throughput.seconds_left(ahead) == 20.0  # nothing else is known or forecast
    watch.spend(5.0, "validation")
    watch.spend(9.0, "validation")
    watch.spend(30.0, "save")
    assert watch.throughput.seconds_left(ahead) == 10 * 2.0 + 3 * 7.0 + 2 * 30.0


def test_what_was_not_measured_yet_is_forecast_the_ending_too() -> None:
    plan = BatchPlan(micro=4, accumulation=2, world_size=2, sequence_length=8)  # 16 windows
    expected = forecast(
        plan, validation_windows=24, task_tokens=192, sample_tokens=60, exports=True
    )
    # A forward pass is a third of a step's work; a sample is 60 half ones of half a step.
    assert expected == Forecast(validation=0.5, tasks=0.5, sample=5.0, exports=True)
    watch = Watch(expected)
    watch.spend(40.0, "start_up")
    watch.spend(2.0)
    ahead = {**AHEAD, "tasks": 1, "sample": 1}
    assert watch.throughput.seconds_left(ahead) == 20.0 + 3 * 1.0 + 1.0 + 10.0 + 40.0
    watch.spend(8.0, "validation")
    assert watch.throughput.seconds_left(ahead) == 20.0 + 3 * 8.0 + 1.0 + 10.0 + 40.0
