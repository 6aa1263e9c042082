"""The time, the speed and the cost that a reporter tells of a run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_reporter import PLAN, Session, listened

from refocused.data.order.position import Position
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import Cadence

pytestmark = pytest.mark.usefixtures("screen")


def test_time_and_cost_go_on_over_a_resume(tmp_path: Path) -> None:
    session = Session(tmp_path, per_hour_usd=100.0)
    session.reporter.begin(TrainState(seconds=3600.0, cost_usd=70.0))  # an hour at another price
    state = session.step(TrainState(step=11, tokens=6600), seconds=36.0)
    assert (state.seconds, state.cost_usd) == (3636.0, pytest.approx(71.0))
    state = session.step(state.after_step(PLAN, Position()), seconds=36.0)
    assert (state.seconds, state.cost_usd) == (3672.0, pytest.approx(72.0))
    last = session.records()[-1]
    assert last["seconds_trained"] == 3672.0
    assert last["cost_usd"] == pytest.approx(72.0)


def test_what_a_rewind_threw_away_is_paid_for_all_the_same(tmp_path: Path) -> None:
    first = Session(tmp_path, per_hour_usd=100.0)
    first.reporter.start(TrainState())
    saved = first.step(TrainState(step=10), seconds=36.0)
    first.step(TrainState(step=20), seconds=72.0)  # crashed here, before it was saved
    first.reporter.close()

    second = Session(tmp_path, per_hour_usd=200.0)
    second.reporter.begin(saved)
    state = second.step(TrainState(step=11), seconds=18.0)
    assert (state.seconds, state.cost_usd) == (126.0, pytest.approx(4.0))


def test_a_start_from_scratch_counts_what_earlier_attempts_took(tmp_path: Path) -> None:
    first = Session(tmp_path, per_hour_usd=100.0)
    first.clock.now += 36.0
    first.reporter.start(TrainState())
    first.clock.now += 36.0
    first.reporter.write_failure(TrainState(), RuntimeError("nothing was saved"), 1)
    second = Session(tmp_path, per_hour_usd=100.0)
    second.reporter.begin(TrainState())
    assert second.reporter.spent_usd() == pytest.approx(2.0)


def test_every_second_of_a_session_is_recorded_once(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.clock.now += 30.0
    session.reporter.start(TrainState(step=4))
    for _ in range(2):
        session.clock.now += 1.0  # waiting for a batch
        session.throughput.begin_step()
        session.clock.now += 5.0
        session.throughput.begin_update()
        session.clock.now += 2.0
        session.throughput.end_step()
        session.throughput.lap("step")
    session.clock.now += 0.5
    session.reporter.step(TrainState(step=6), [torch.tensor([3.0])] * 2, 2.0)
    session.clock.now += 8.0
    session.throughput.lap("save")
    session.clock.now += 4.0
    session.reporter.end(TrainState(step=6))
    opening, steps, ending = session.records("performance_metrics")
    assert (opening["kind"], opening["step"], opening["start_up_seconds"]) == ("session", 4, 30.0)
    assert (steps["first_step"], steps["step"]) == (4, 6)
    uses = ("forward_backward", "update", "data_wait", "other")
    assert [steps[f"{use}_seconds"] for use in uses] == [10.0, 4.0, 2.0, 0.5]
    assert (ending["save_stall_seconds"], ending["ending_seconds"]) == (8.0, 4.0)
    assert ending["seconds_trained"] == 30.0 + 16.5 + 12.0
    assert session.reporter.run_time().goodput_fraction == 14.0 / 58.5


@pytest.mark.parametrize("fails", [False, True])
def test_one_cost_is_told_everywhere_at_the_end(tmp_path: Path, fails: bool) -> None:
    session = Session(tmp_path, per_hour_usd=100.0)
    trackers = listened(session)
    session.reporter.start(TrainState())
    state = session.step(TrainState(step=100), seconds=36.0)
    assert trackers.records[-1]["cost_usd"] == pytest.approx(1.0)
    session.clock.now += 72.0  # the mirror, the export
    if fails:
        session.reporter.write_failure(state, RuntimeError("lost"), 1)
    else:
        session.reporter.write_state(session.reporter.end(state), "finished")
    last = session.records("performance_metrics")[-1]
    assert session.state_file()["cost_usd"] == pytest.approx(3.0)
    assert trackers.records[-1]["cost_usd"] == last["cost_usd"] == session.state_file()["cost_usd"]
    assert last.get("finished", False) is not fails


def test_without_a_price_the_cost_stays_what_it_was(tmp_path: Path) -> None:
    session = Session(tmp_path)
    assert session.step(TrainState(step=1), seconds=9.0).cost_usd is None
    session.reporter.begin(TrainState(seconds=1.0, cost_usd=4.5))
    assert session.step(TrainState(step=2), seconds=9.0).cost_usd == 4.5


def test_speed_mfu_and_what_is_left_by_hand(tmp_path: Path) -> None:
    session = Session(tmp_path, per_hour_usd=36.0)
    session.step(TrainState(step=40, tokens=24_000), seconds=2.0)
    record = session.records()[0]
    assert record["step_seconds"] == 2.0
    assert record["tokens_per_second"] == 300.0
    assert record["mfu_fraction"] == 0.25
    assert record["seconds_left"] == 60 * 2.0  # nothing is known of validations and saves yet
    assert record["cost_left_usd"] == pytest.approx(1.2)

    session.clock.now += 5.0
    session.throughput.lap("validation")
    session.clock.now += 7.0
    session.throughput.lap("save")
    session.step(TrainState(step=41), seconds=2.0)
    # 59 steps, validations at 50 and 100, saves at 50, 75 and 100
    record = session.records()[1]
    assert record["seconds_left"] == 59 * 2.0 + 2 * 5.0 + 3 * 7.0
    # One step of 600 tokens in 14 seconds, of which it took 2.
    assert (record["step_seconds"], record["mfu_fraction"]) == (2.0, 0.25)
    assert record["tokens_per_second"] == 600 / 14


def test_what_a_log_line_waits_for_belongs_to_its_step(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.clock.now += 1.0
    session.throughput.lap("step")
    session.clock.now += 3.0  # the device is behind: reading the loss waits for it
    session.reporter.step(TrainState(step=1), [torch.tensor([3.0])], 0.0)
    assert session.records()[0]["step_seconds"] == 4.0


def test_the_time_left_is_right_where_steps_are_uneven(tmp_path: Path) -> None:
    total, draw = 3000, random.Random(0)
    cadence = Cadence(log=20, validation=100, checkpoint=250)
    session, told = Session(tmp_path, total_steps=total, cadence=cadence), {}
    for step in range(1, total + 1):
        session.clock.now += draw.choice((1.0, 1.0, 1.0, 6.0))
        session.throughput.lap("step")
        if cadence.due("log", step):
            session.reporter.step(TrainState(step=step), [torch.tensor([3.0])], 0.0)
            told[step] = session.clock.now
        if cadence.due("validation", step):
            session.clock.now += draw.uniform(10.0, 40.0)
            session.throughput.lap("validation")
        if cadence.due("checkpoint", step):
            session.clock.now += draw.uniform(10.0, 90.0)
            session.throughput.lap("save")
    ended = session.clock.now
    errors = {
        record["step"]: record["seconds_left"] / (ended - told[record["step"]]) - 1
        for record in session.records()
        if 300 <= record["step"] <= 2500
    }
    worst = max(errors, key=lambda step: abs(errors[step]))
    assert abs(errors[worst]) < 0.15, (worst, errors[worst])


def test_an_impossible_mfu_is_left_out_and_doubted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    for step in (1, 2):
        session.step(TrainState(step=step), seconds=0.5)  # 1,200 tokens a second: 100 %
    records = [record for record in session.records() if record["kind"] == "step"]
    assert [record["mfu_fraction"] for record in records] == [None, None]
    lines = [record.message for record in caplog.records]
    assert sum("MFU ?" in line for line in lines) == 2
    assert sum("MFU 100% is more than any training" in line for line in lines) == 1


def test_the_share_of_waiting_is_of_the_time_since_the_last_line(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.step(TrainState(step=1), seconds=10.0, waited=2.0)
    session.step(TrainState(step=2), seconds=10.0, waited=7.0)
    session.step(TrainState(step=3), seconds=10.0, waited=7.0)
    shares = [record["data_wait_fraction"] for record in session.records()]
    assert shares == pytest.approx([0.2, 0.5, 0.0])


def test_things_are_due_at_their_multiples_and_zero_is_never() -> None:
    cadence = Cadence(log=2, validation=3, checkpoint=5)
    steps = range(1, 11)
    assert [step for step in steps if cadence.due("log", step)] == [2, 4, 6, 8, 10]
    assert [step for step in steps if cadence.due("validation", step)] == [3, 6, 9]
    assert not any(cadence.due("sample", step) for step in steps)
    assert Cadence(log=0, validation=0, checkpoint=0).ahead(3, 10)["save"] == 1  # the last step


@given(
    step=st.integers(1, 60),
    more=st.integers(0, 60),
    interval=st.integers(0, 20),
    saves=st.integers(0, 20),
    save_best=st.booleans(),
)
def test_what_is_ahead_is_what_the_loop_will_do(
    step: int, more: int, interval: int, saves: int, save_best: bool
) -> None:
    total = step + more
    cadence = Cadence(log=1, validation=interval, checkpoint=saves, save_best=save_best)
    to_come = range(step, total + 1)  # a step's validation and save come after its log line
    validations = [one for one in to_come if one == total or cadence.due("validation", one)]
    saved = {one for one in to_come if one == total or cadence.due("checkpoint", one)}
    ahead = cadence.ahead(step, total)
    assert ahead["step"] == more
    assert ahead["validation"] == len(validations)
    assert ahead["save"] == len(saved | set(validations) if save_best else saved)


@pytest.mark.parametrize(
    ("step", "facts", "reasons"),
    [
        (4, "", ""),
        (5, "", "rolling"),
        (5, "epoch_ended last", "rolling epoch final"),
        (4, "is_best", ""),
        (4, "stopping", "emergency"),
        (5, "stopping", "rolling"),  # it would have been saved anyway
    ],
)
def test_a_save_says_what_it_is_for(step: int, facts: str, reasons: str) -> None:
    names = ("last", "epoch_ended", "is_best", "stopping")
    given = {name: name in facts.split() for name in names}
    cadence = Cadence(log=1, validation=0, checkpoint=5, keep_epochs=True)
    assert [reason.value for reason in cadence.reasons_to_save(step, **given)] == reasons.split()
    if facts == "epoch_ended last":  # without keep_epochs
        plain = Cadence(log=1, validation=0, checkpoint=5).reasons_to_save(step, **given)
        assert [reason.value for reason in plain] == ["rolling", "final"]
