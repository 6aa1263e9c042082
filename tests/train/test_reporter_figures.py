"""The reporter's figures: cost, speed, MFU and the time left."""

import dataclasses
import datetime
import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fakes import PLAN, Listening, Reporting

from refocused.config.cadence import Cadence
from refocused.data.order.sequences import Position
from refocused.metrics.history import unix_time
from refocused.metrics.jsonl import JsonLines
from refocused.train.step.state import TrainState

pytestmark = pytest.mark.usefixtures("screen")


def test_cost_includes_steps_lost_by_a_rewind(tmp_path: Path) -> None:
    first = Reporting(tmp_path, per_hour_usd=100.0)
    first.reporter.start(TrainState())
    saved = first.step(TrainState(step=10), seconds=36.0)
    first.step(TrainState(step=20), seconds=72.0)  # crashed here, before it was saved
    first.reporter.close()

    second = Reporting(tmp_path, per_hour_usd=200.0)
    second.reporter.begin(saved)
    state = second.step(TrainState(step=11), seconds=18.0)
    assert (state.seconds, state.cost_usd) == (126.0, pytest.approx(4.0))


def test_cost_includes_earlier_attempts(tmp_path: Path) -> None:
    first = Reporting(tmp_path, per_hour_usd=100.0)
    first.clock.now += 36.0
    first.reporter.start(TrainState())
    first.clock.now += 36.0
    first.reporter.write_failure(TrainState(), RuntimeError("nothing was saved"), 1)
    second = Reporting(tmp_path, per_hour_usd=100.0)
    second.reporter.begin(TrainState())
    assert second.reporter.booked(TrainState()).cost_usd == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("sampled", "command_began", "lost"),
    [
        (None, 50.0, 50.0),  # the command that starts the ranks
        (100.0, None, 100.0),  # a hang, or a crash, of a session before
        (100.0, 50.0, 150.0),
        (100.0, 5000.0, 1000.0),  # this command has restarted the ranks
        (None, 5000.0, 1000.0),
        (1000.5, 50.0, 50.0),  # of this session's own sampler
    ],
)
def test_cost_includes_hangs_crashes_and_restarts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampled: float | None,
    command_began: float | None,
    lost: float,
) -> None:
    first = Reporting(tmp_path, per_hour_usd=3600.0)
    first.reporter.start(TrainState())
    saved = first.step(TrainState(step=10), seconds=30.0)
    first.reporter.close()
    ended = unix_time(first.records("performance_metrics")[-1]["time"]) or 0.0
    for after in (0.0, sampled or 0.0):
        at = datetime.datetime.fromtimestamp(ended + after, datetime.UTC).isoformat()
        JsonLines(tmp_path / "logs" / "gpu_metrics.jsonl").write({"kind": "system", "time": at})
    monkeypatch.setattr(time, "time", lambda: ended + 1000)
    began = None if command_began is None else time.monotonic() - command_began
    second = Reporting(tmp_path, per_hour_usd=3600.0, command_began_seconds=began)
    second.reporter.begin(saved)
    state = second.step(TrainState(step=11), seconds=18.0)
    assert state.seconds == pytest.approx(30 + lost + 18, abs=5)
    assert state.cost_usd == pytest.approx(state.seconds)


@pytest.mark.parametrize("fails", [False, True])
def test_all_records_have_the_same_final_cost(tmp_path: Path, fails: bool) -> None:
    session = Reporting(tmp_path, per_hour_usd=100.0)
    trackers = Listening(session)
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


def test_without_a_price_the_cost_does_not_change(tmp_path: Path) -> None:
    session = Reporting(tmp_path)
    assert session.step(TrainState(step=1), seconds=9.0).cost_usd is None
    session.reporter.begin(TrainState(seconds=1.0, cost_usd=4.5))
    assert session.step(TrainState(step=2), seconds=9.0).cost_usd == 4.5


def test_speed_mfu_and_time_left_by_hand(tmp_path: Path) -> None:
    session = Reporting(tmp_path, per_hour_usd=36.0)
    session.step(TrainState(step=40, tokens=24_000), seconds=2.0)
    record = session.records()[0]
    assert record["step_seconds"] == 2.0
    assert record["tokens_per_second"] == 300.0
    assert record["mfu_fraction"] == 0.25
    assert record["seconds_left"] == 60 * 2.0  # nothing is known of validations and saves yet
    assert record["cost_left_usd"] == pytest.approx(1.2)

    session.clock.now += 5.0
    session.meter.lap("validation")
    session.clock.now += 7.0
    session.meter.lap("save")
    session.step(TrainState(step=41), seconds=2.0)
    # 59 steps, validations at 50 and 100, saves at 50, 75 and 100
    record = session.records()[1]
    assert record["seconds_left"] == 59 * 2.0 + 2 * 5.0 + 3 * 7.0
    # One step of 600 tokens in 14 seconds, of which it took 2.
    assert (record["step_seconds"], record["mfu_fraction"]) == (2.0, 0.25)
    assert record["tokens_per_second"] == 600 / 14


def test_the_warm_up_of_the_batch_by_hand(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, warmup_steps=3)  # 1, 1, 2, 3 passes
    session = Reporting(tmp_path, plan=plan)
    state = TrainState().after_step(session.plan, Position())
    session.step(state, seconds=2.0, work=1 / 3)
    record = session.records()[0]
    assert (record["tokens"], record["tokens_per_second"]) == (200, 100.0)
    assert record["mfu_fraction"] == pytest.approx(100 / 1200)
    assert record["seconds_left"] == pytest.approx((1 + 2 + 97 * 3) * 2.0)  # two seconds a pass


def test_the_wait_for_the_loss_counts_as_step_time(tmp_path: Path) -> None:
    session = Reporting(tmp_path)
    session.clock.now += 1.0
    session.meter.lap("step")
    session.clock.now += 3.0  # the device is behind: reading the loss waits for it
    session.reporter.step(TrainState(step=1), [torch.tensor([3.0])], 0.0)
    assert session.records()[0]["step_seconds"] == 4.0


def test_the_time_left_is_accurate_for_uneven_steps(tmp_path: Path) -> None:
    total, draw = 3000, random.Random(0)
    cadence = Cadence(log=20, validation=100, checkpoint=250)
    session, told = Reporting(tmp_path, total_steps=total, cadence=cadence), {}
    for step in range(1, total + 1):
        session.clock.now += draw.choice((1.0, 1.0, 1.0, 6.0))
        session.meter.lap("step")
        if cadence.due("log", step):
            session.reporter.step(TrainState(step=step), [torch.tensor([3.0])], 0.0)
            told[step] = session.clock.now
        if cadence.due("validation", step):
            session.clock.now += draw.uniform(10.0, 40.0)
            session.meter.lap("validation")
        if cadence.due("checkpoint", step):
            session.clock.now += draw.uniform(10.0, 90.0)
            session.meter.lap("save")
    ended = session.clock.now
    errors = {
        record["step"]: record["seconds_left"] / (ended - told[record["step"]]) - 1
        for record in session.records()
        if 300 <= record["step"] <= 2500
    }
    worst = max(errors, key=lambda step: abs(errors[step]))
    assert abs(errors[worst]) < 0.15, (worst, errors[worst])


def test_an_impossible_mfu_is_omitted_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Reporting(tmp_path)
    for step in (1, 2):
        session.step(TrainState(step=step), seconds=0.4)  # 1,500 tokens a second: 125 %
    records = [record for record in session.records() if record["kind"] == "step"]
    assert [record["mfu_fraction"] for record in records] == [None, None]
    lines = [record.message for record in caplog.records]
    assert sum("MFU ?" in line for line in lines) == 2
    assert sum("MFU 125% is more than the GPU's peak allows (100%)" in line for line in lines) == 1
    session.step(TrainState(step=3), seconds=0.5)
    assert session.records()[-1]["mfu_fraction"] == 1.0  # all that a GPU can do


def test_the_share_of_waiting_is_since_the_last_line(tmp_path: Path) -> None:
    session = Reporting(tmp_path)
    session.step(TrainState(step=1), seconds=10.0, waited=2.0)
    session.step(TrainState(step=2), seconds=10.0, waited=7.0)
    session.step(TrainState(step=3), seconds=10.0, waited=7.0)
    shares = [record["data_wait_fraction"] for record in session.records()]
    assert shares == pytest.approx([0.2, 0.5, 0.0])


def test_waits_after_a_rewind_are_booked_from_its_first_line(tmp_path: Path) -> None:
    session = Reporting(tmp_path)
    session.reporter.start(TrainState())
    session.step(TrainState(step=1), seconds=10.0, waited=7.0)
    session.reporter.start(TrainState())  # the loader counts from 0 again
    session.step(TrainState(step=1), seconds=10.0, waited=3.0)
    records = session.records("performance_metrics")
    spent = [record["data_wait_seconds"] for record in records if record["kind"] != "start"]
    assert spent == pytest.approx([0.0, 7.0, 0.0, 3.0])


@given(
    step=st.integers(1, 60),
    more=st.integers(0, 60),
    interval=st.integers(0, 20),
    saves=st.integers(0, 20),
    save_best=st.booleans(),
)
def test_the_remaining_actions_are_those_of_the_loop(
    step: int, more: int, interval: int, saves: int, save_best: bool
) -> None:
    total = step + more
    cadence = Cadence(log=1, validation=interval, checkpoint=saves, save_best=save_best)
    to_come = range(step, total + 1)  # a step's validation and save come after its log line
    validations = [one for one in to_come if one == total or cadence.due("validation", one)]
    saved = {one for one in to_come if one == total or cadence.due("checkpoint", one)}
    ahead = cadence.ahead(step, total, PLAN)
    assert ahead["step"] == more
    assert ahead["validation"] == len(validations)
    assert ahead["save"] == len(saved | set(validations) if save_best else saved)
