from __future__ import annotations

import json

import pytest
import torch

from refocused.config.batch_plan import BatchPlan
from refocused.metrics.meter import PENDING_STEPS, RECENT, Activity, Meter, forecast
from refocused.metrics.run_time import PERFORMANCE_FILE, RunTime, RunTimeReader, TimeSpent


def line(kind, step, at, *, first=0, **uses):
    seconds = {f"{name}_seconds": value for name, value in uses.items()}
    return {"kind": kind, "step": step, "first_step": first, "time": f"{at}.000Z", **seconds}


def added(records):
    reader = RunTimeReader()
    for record in records:
        reader.add(record)
    return reader.read()


# Started at 08:00:00; a minute of start-up, 100 steps, a save, 50 more; killed after 08:05:20.
FIRST = [
    line("session", 0, "2026-11-22T08:01:00", start_up=60.0),
    line("time", 100, "2026-11-22T08:04:00", forward_backward=150, update=20, data_wait=10),
    line("save", 100, "2026-11-22T08:04:10", save_stall=10),
    line(
        "time", 150, "2026-11-22T08:05:20", first=100, forward_backward=50, update=10, save_stall=20
    ),
]
# Started again at 08:10:20 from step 120: 30 of the 50 steps were lost.
SECOND = [
    line("session", 120, "2026-11-22T08:11:00", start_up=40.0),
    line("time", 200, "2026-11-22T08:13:00", first=120, forward_backward=90, validation=30),
    line("time", 200, "2026-11-22T08:13:10", first=200, ending=10.0),
]


def test_a_session_and_a_resume_with_a_rewind_by_hand():
    found = added(FIRST)
    assert found.elapsed_seconds == 320.0  # 08:00:00 to 08:05:20
    assert (found.productive_seconds, found.goodput_fraction) == (230.0, 230.0 / 320.0)
    assert (found.sessions, found.redone_seconds) == (1, 0.0)
    found = added(FIRST + SECOND)
    assert found.elapsed_seconds == 790.0  # 08:00:00 to 08:13:10
    assert found.away_seconds == 300.0  # 08:05:20 to 08:10:20
    assert found.redone_seconds == 60.0 * 30 / 50
    assert found.productive_seconds == 230.0 + 90.0 - 36.0
    assert found.goodput_fraction == pytest.approx(284.0 / 790.0)
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    seconds = {name: round(share * 790, 6) for name, share in shares.items() if share}
    assert seconds == {
        **{"steps": 284.0, "redone steps": 36.0, "start-up": 100.0, "saves": 20.0},
        **{"validation": 30.0, "data": 10.0, "down": 300.0, "ending": 10.0},
    }
    text = found.as_line()
    assert text.startswith("goodput 35.9%: steps 35.9% | redone steps 4.6% | start-up 12.7% | ")
    assert "down 38.0%" in text and "other" not in text and "hang" not in text


def test_a_hang_lasts_from_the_last_line_to_the_stop_of_the_watchdog(tmp_path):
    # As the watchdog writes it.
    alarm = {"kind": "alarm", "alarm": "hang", "raised": True}
    stopped, late, early = (
        {**alarm, "time": f"2026-11-22T{clock}Z"} for clock in ("08:08:20", "09:08:20", "07:48:20")
    )
    found = added([stopped, *FIRST, *SECOND])
    assert (found.hang_seconds, found.away_seconds, found.elapsed_seconds) == (180.0, 120.0, 790.0)
    assert sum(found.shares().values()) == pytest.approx(1.0)
    assert added([early, *FIRST, *SECOND]).hang_seconds == 0.0  # of an earlier life
    assert added([late, *FIRST, *SECOND]).hang_seconds == 3310.0  # after the last line
    reader, logs = RunTimeReader(tmp_path), tmp_path / PERFORMANCE_FILE  # while the run goes on
    logs.parent.mkdir()
    logs.write_text("".join(json.dumps(one) + "\n" for one in FIRST))
    assert reader.read() == added(FIRST)
    (logs.parent / "events.jsonl").write_text(json.dumps(stopped) + "\n")
    assert reader.read() == added([stopped, *FIRST])
    with logs.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in SECOND)
    assert reader.read() == found


@pytest.mark.parametrize(
    ("later", "redone", "away"),
    [
        # A rewind behind a rewind loses nothing twice.
        ([line("session", 120, "2026-11-22T08:14:00")] * 2, 36.0 + 90.0, 300.0 + 50.0),
        # A start from scratch loses everything.
        ([line("session", 0, "2026-11-22T08:13:10")], 230.0 + 90.0, 300.0),
        # A clock that was set back makes no negative time.
        ([line("session", 200, "2026-11-22T07:00:00")], 36.0, 300.0),
    ],
)
def test_later_sessions(later, redone, away):
    found = added([*FIRST, *SECOND, *later])
    assert (found.redone_seconds, found.away_seconds) == (pytest.approx(redone), away)


def test_the_time_after_a_finished_run_is_not_away():
    ended = [*FIRST, *SECOND[:-1], {**SECOND[-1], "finished": True}]
    again = [*ended, line("session", 200, "2026-11-22T20:00:00", start_up=9.0)]
    found = added(again)
    assert (found.away_seconds, found.elapsed_seconds) == (300.0, 790.0 + 9.0)
    longer = line("time", 300, "2026-11-22T20:01:00", first=200, forward_backward=60)
    killed = line("session", 300, "2026-11-22T21:01:00", start_up=60.0)  # an hour before
    assert added([*again, longer, killed]).away_seconds == 3840.0


def test_a_file_with_torn_and_foreign_lines_is_read(tmp_path):
    file = tmp_path / PERFORMANCE_FILE
    assert RunTimeReader(tmp_path).read() == RunTime()
    file.parent.mkdir()
    lines = [json.dumps(record) for record in FIRST]
    lines[2:2] = ['{"kind": "time", "step": 1', "[]", '{"kind": "session"}', "\xff"]
    file.write_bytes("\n".join([*lines, "torn"]).encode("latin-1"))
    assert RunTimeReader(tmp_path).read() == added(FIRST)
    assert added([]).goodput_fraction is None


AHEAD: dict[Activity, int] = {"step": 10, "validation": 3, "save": 2, "ending": 1}


class Watch:
    """A clock that a test moves, with a meter on it whose session began 10 s before."""

    def __init__(self, expected=None):
        self.now = 50.0
        self.meter = Meter(lambda: self.now, began_seconds=40.0)
        self.meter.forecast = expected or {}
        self.spend(0.0, "start_up")

    def spend(self, seconds, activity="step"):
        self.now += seconds
        return self.meter.lap(activity)

    def take_step(self, passes, update):
        self.meter.begin_step()
        self.now += passes
        self.meter.begin("update")
        self.now += update
        self.meter.end_step()
        self.meter.lap("step")


def test_a_continued_lap_belongs_to_the_one_before():
    watch = Watch()
    for _ in range(12):
        assert watch.spend(1.0) == 1.0
        watch.now += 4.0
        assert watch.meter.lap("step", continued=True) == 4.0
    assert watch.meter.seconds_left({"step": 1}) == 5.0
    assert (watch.meter.laps["step"], watch.meter.steps) == (60.0, 12)
    assert watch.meter.session_seconds == 70.0


Laps = list[tuple[float, Activity]]
STEP_AND_REST: Laps = [(2.0, "step"), (100.0, "validation"), (200.0, "save")]


@pytest.mark.parametrize(
    ("laps", "ahead", "left"),
    [
        ([(5.0, "validation")], {"step": 3}, None),  # before the first step
        # The mean of steps alone, slow ones included.
        ([*STEP_AND_REST, (3.0, "step"), *STEP_AND_REST, (41.0, "step")], {"step": 2}, 24.0),
        # The first ten steps count only until there are others.
        ([(9.0, "step")] * 10, {"step": 1}, 9.0),
        ([*[(9.0, "step")] * 10, (1.0, "step")], {"step": 1}, 1.0),
        # A new pace replaces the old one.
        ([*[(8.0, "step")] * RECENT, *[(2.0, "step")] * RECENT], {"step": 1}, 2.0),
        # What is neither measured nor forecast takes no time.
        ([(2.0, "step")], AHEAD, 20.0),
        # Validations and saves have their own speed.
        (
            [(2.0, "step"), (5.0, "validation"), (9.0, "validation"), (30.0, "save")],
            AHEAD,
            10 * 2.0 + 3 * 7.0 + 2 * 30.0,
        ),
    ],
)
def test_the_time_left(laps, ahead, left):
    watch = Watch()
    for seconds, activity in laps:
        watch.spend(seconds, activity)
    assert watch.meter.seconds_left(ahead) == left


def test_what_has_not_been_measured_is_forecast_including_the_ending():
    plan = BatchPlan(
        micro_batch_size=4, gradient_accumulation_steps=2, world_size=2, sequence_length=8
    )  # 16 sequences
    expected = forecast(
        plan, validation_sequences=24, task_tokens=192, sample_tokens=60, exports=True
    )
    # A forward pass is a third of a step's work; a sample is 60 half ones of half a step.
    assert expected == {"validation": 0.5, "tasks": 0.5, "sample": 5.0, "ending": 1.0}
    watch = Watch(expected)
    watch.spend(30.0, "start_up")
    watch.spend(2.0)
    ahead: dict[Activity, int] = {**AHEAD, "tasks": 1, "sample": 1}
    assert watch.meter.seconds_left(ahead) == 20.0 + 3 * 1.0 + 1.0 + 10.0 + 40.0
    watch.spend(8.0, "validation")
    assert watch.meter.seconds_left(ahead) == 20.0 + 3 * 8.0 + 1.0 + 10.0 + 40.0


def test_every_second_gets_one_use():
    watch = Watch()
    watch.spend(5.0, "start_up")
    watch.now += 2.0  # for a batch
    watch.take_step(6.0, 1.0)
    watch.spend(3.0, "validation")
    watch.spend(4.0, "save")
    watch.now += 0.25
    spent = watch.meter.time_spent(waited_seconds=2.0)
    assert spent == TimeSpent(
        start_up_seconds=15.0,
        forward_backward_seconds=6.0,
        update_seconds=1.0,
        data_wait_seconds=2.0,
        save_stall_seconds=4.0,
        validation_seconds=3.0,
        other_seconds=0.25,
    )
    assert spent.total_seconds == watch.meter.session_seconds == 31.25
    assert TimeSpent(**spent.as_record()) == spent
    # The next record holds only what is new. The host had waited 7 s more for its batch, all but
    # one of them while the GPU was busy.
    watch.take_step(8.0, 2.0)
    watch.now += 1.0
    assert watch.meter.time_spent(waited_seconds=9.0) == TimeSpent(
        forward_backward_seconds=8.0, update_seconds=2.0, data_wait_seconds=1.0
    )
    for _ in range(3 * PENDING_STEPS):
        watch.take_step(1.0, 0.5)
    assert watch.meter.time_spent() == TimeSpent(
        forward_backward_seconds=3.0 * PENDING_STEPS, update_seconds=1.5 * PENDING_STEPS
    )
    watch.now += 1800.0  # until a failure is noticed
    assert watch.meter.time_without_use() == TimeSpent(other_seconds=1800.0)


def test_marks_on_a_gpu_wait_only_for_the_later_one_and_give_seconds(monkeypatch):
    asked: list[str] = []

    class Event:
        made = 0

        def __init__(self, *, enable_timing):
            assert enable_timing
            Event.made += 1
            self.number = Event.made

        def record(self):
            asked.append(f"record {self.number}")

        def synchronize(self):
            asked.append(f"wait {self.number}")

        def elapsed_time(self, later):
            return 1500.0 * (later.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    meter = Meter(lambda: 100.0, device_kind="cuda", began_seconds=0.0)
    meter.begin_step()
    meter.begin("update")
    meter.end_step()
    assert "wait" not in "".join(asked)
    spent = meter.time_spent()
    assert (spent.forward_backward_seconds, spent.update_seconds) == (1.5, 1.5)
    assert asked[-2:] == ["wait 2", "wait 3"]


def test_phases_add_up_and_may_have_parts():
    start = Meter(began_seconds=100.0)
    start.end_phase("exit", at_seconds=101.5)
    start.end_phase("launch", at_seconds=104.0)
    start.end_phase("launch", at_seconds=103.9)  # clocks of other processes may differ a little
    for at, phase in ((107.0, "imports"), (107.25, "join"), (109.0, "imports")):
        start.end_phase(phase, at_seconds=at)
    start.start_up.first_batch_seconds = 0.5
    assert start.start_up.as_record() == {
        "exit_seconds": 1.5,
        "launch_seconds": 2.5,
        "imports_seconds": 3.1 + 1.75,
        "join_seconds": 0.25,
        "first_batch_seconds": 0.5,
    }
    assert start.start_up.as_line(1001) == (
        "  start-up 9.6 s from a crash to step 1,001: exit 1.5 | launch 2.5 | imports 4.8 | "
        "join 0.2 | first batch 0.5 s"
    )


def test_without_a_crash_the_start_is_counted_from_the_command():
    start = Meter(began_seconds=0.0)
    start.end_phase("imports", at_seconds=3.0)
    assert start.start_up.as_line(1) == "  start-up 3.0 s from the start to step 1: imports 3.0 s"
