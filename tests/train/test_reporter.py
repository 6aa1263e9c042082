"""The reporter: records and messages in files, on the screen and in trackers."""

import dataclasses
import datetime
import math
import os
import random
import socket
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fakes import OPTIMIZER, PLAN, FakeEngine, Listening, Reporting
from thread_ranks import on_two_ranks, results

from refocused.config.cadence import Cadence
from refocused.data.order.sequences import Position
from refocused.evaluate.continuations import ValidationLoss
from refocused.metrics.history import unix_time
from refocused.metrics.jsonl import JsonLines
from refocused.metrics.meter import MARKED_EVERY
from refocused.metrics.rank_times import WINDOW
from refocused.metrics.trackers import Histogram
from refocused.train.step.state import TrainState

pytestmark = pytest.mark.usefixtures("screen")


def test_a_step_is_recorded_with_the_engines_figures(tmp_path):
    engine = FakeEngine([], norm=0.75, scale=4096.0, skipped_steps=3)
    session = Reporting(tmp_path, engine=engine)
    session.step(TrainState(step=1, position=Position(2, 5)), seconds=1.0)
    (record,) = session.records()
    names = ("kind", "gradient_norm", "loss_scale", "skipped_steps", "epoch", "gpu_memory_fraction")
    assert [record[name] for name in names] == ["step", 0.75, 4096.0, 3, 2, None]
    assert record["learning_rate"] == OPTIMIZER.lr / 2  # of the step itself
    assert "sources" not in record


def test_a_validation_is_reported_with_its_perplexity(tmp_path, caplog):
    session = Reporting(tmp_path)
    best = TrainState(step=1500, tokens=90).after_validation(2.0, 0.75)
    session.reporter.validation(best, 12.4, {})
    worse = TrainState(step=1600, best_loss=1.0, validation_set="").after_validation(3.0)
    by_source = {"code": ValidationLoss(2.5, 0.5), "web": ValidationLoss(3.25)}
    session.reporter.validation(worse, 150.0, by_source)
    assert caplog.messages == [
        "eval   1,500 val 2.0000 ppl 7.39 bpb 0.7500 (best) | 12 s",
        "eval   1,600 val 3.0000 ppl 20.09 | code 2.5000 bpb 0.5000 | web 3.2500 | 2.5 min",
    ]
    record, mixed = session.records()
    assert (record["step"], record["tokens"], record["seconds"]) == (1500, 90, 12.4)
    assert record["perplexity"] == pytest.approx(math.exp(2.0))
    assert (record["bits_per_byte"], mixed["bits_per_byte"]) == (0.75, None)  # unknown
    assert "sources" not in record
    assert mixed["sources"] == {
        "code": {"validation_loss": 2.5, "bits_per_byte": 0.5},
        "web": {"validation_loss": 3.25, "bits_per_byte": None},
    }


def test_events_are_written_and_failures_are_warnings(tmp_path, caplog):
    session = Reporting(tmp_path)
    told: list[tuple[str, str, dict[str, object]]] = [
        ("start", "from step 0", {}),
        ("save_failed", "disk full", {"step": 3}),
        ("finished", "", {"exit_code": 0}),
    ]
    for kind, text, facts in told:
        session.reporter.event(kind, text, **facts)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "from step 0"),
        ("WARNING", "disk full"),
    ]
    for event, (kind, text, facts) in zip(session.records("events"), told, strict=True):
        assert event.items() >= {"kind": kind, "text": text, **facts}.items()


def test_losses_are_means_over_ranks_and_steps_written_by_rank_0(tmp_path):
    def action(world):
        session = Reporting(tmp_path / str(world.rank), world=world)
        found = []
        two_steps = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])]  # of two passes
        for step, losses in ((2, two_steps), (3, [torch.tensor([9.0, 9.0])])):
            session.meter.lap("step")
            mine = [loss + world.rank for loss in losses]
            found.append(session.reporter.step(TrainState(step=step), mine, 0.0).loss)
        session.reporter.validation(TrainState(step=3).after_validation(2.0), 1.0, {})
        session.reporter.event("save", "saved")
        session.reporter.write_state(TrainState(), "training")
        session.reporter.close()
        return found

    assert results(on_two_ranks(action)) == [[6.5, 9.5]] * 2
    first, second, validation = Reporting(tmp_path / "0").records()
    assert (first["loss"], first["loss_mean"]) == (6.5, 4.5)
    assert (second["loss"], second["loss_mean"]) == (9.5, 9.5)
    assert validation["kind"] == "validation"
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(("phase", "waited"), [("backward", 0.0), ("data", 0.75)])
def test_the_rank_that_works_longest_is_recorded_and_named_once_it_is_slow(
    tmp_path, caplog, phase, waited
):
    def action(world):
        session = Reporting(tmp_path / str(world.rank), world=world)
        meter, clock = session.meter, session.clock
        for step in range(1, MARKED_EVERY * WINDOW + 1):
            meter.begin_step()
            clock.now += 1.0
            meter.begin("backward")
            clock.now += 2.5 if world.rank else 2.0
            meter.begin("wait")
            clock.now += 0.5 - 0.5 * world.rank
            meter.end_step()
            session.step(TrainState(step=step), seconds=waited, waited=step * waited * world.rank)

    results(on_two_ranks(action))
    *others, last = Reporting(tmp_path / "0").records()
    assert {one["slowest"] is None for one in others} == {True}
    slowest = {"rank": 1, "host": socket.gethostname(), "phase": phase}
    assert last["slowest"].items() >= {**slowest, "limit_fraction": 0.06}.items()
    assert last["slowest"]["excess_fraction"] == pytest.approx((0.5 + waited) / 3, abs=1e-3)
    (line,) = (line for line in caplog.messages if "slow" in line)
    excess = f"{(0.5 + waited) / 3:.0%}"
    assert f"rank 1 on {socket.gethostname()} slow +{excess} ({phase})" in line
    found = Reporting(tmp_path / "0").records("performance_metrics")
    of_ranks = [one for one in found if "ranks_wait_seconds" in one]
    assert len(of_ranks) == WINDOW
    assert of_ranks[0]["ranks_data_seconds"] == [0.0, waited]
    assert of_ranks[0]["ranks_backward_seconds"] == [2.0, 2.5]
    assert of_ranks[0]["ranks_wait_seconds"] == [0.5, 0.0]


def test_the_state_file_has_the_progress_of_the_run(tmp_path):
    local = iter([3, 4])
    session = Reporting(tmp_path, more_of_state=lambda: {"shards_local": next(local)})
    session.step(TrainState(step=40, tokens=24_000, position=Position(0, 80)), seconds=2.0)
    state = {
        "run": "sample",
        "status": "training",
        "pid": os.getpid(),
        "step": 40,
        "total_steps": 100,
        "tokens": 24_000,
        "position": {"epoch": 0, "sequences": 80},
        "shards_local": 3,
    }
    assert session.state_file().items() >= state.items()
    session.reporter.write_state(TrainState(step=40), "finished", mirrored=True)
    ended = {"status": "finished", "mirrored": True, "shards_local": 4}
    assert session.state_file().items() >= ended.items()


def test_a_line_reads_the_device_once(tmp_path):
    session, reads = Reporting(tmp_path), []
    session.meter.lap("step")

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.__name__ in ("item", "tolist", "__float__", "cpu", "numpy"):
                reads.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    losses = [torch.ones(2).as_subclass(Counted) for _ in range(5)]
    session.reporter.step(TrainState(step=5), losses, 0.0)
    assert reads == ["tolist"]


def test_trackers_get_every_record(tmp_path):
    session = Reporting(tmp_path)
    listening = Listening(session)
    state = session.step(TrainState(step=40), seconds=2.0)
    session.reporter.validation(state.after_validation(2.0), 1.0, {})
    session.reporter.tasks(state, [], 1.0)
    session.reporter.sample(state, "what it writes", 1.0)
    drawn = Histogram("weights/head", -1.0, 1.0, (1, 2), 0.5, 3.0)
    session.reporter.histograms(40, [drawn])
    session.reporter.event("save", "saved")
    kinds = ["step", "validation", "tasks", "sample", "histograms"]
    assert [(record["kind"], record["step"]) for record in listening.records] == [
        (kind, 40) for kind in kinds
    ]
    for written, told in zip(session.records(), listening.records, strict=False):
        assert {name: value for name, value in written.items() if name != "time"} == told
    assert listening.records[3]["sample"] == "what it writes"
    assert listening.records[4]["histograms"] == [drawn]
    assert drawn.edges == [-1.0, 0.0, 1.0]


def test_trackers_are_closed_once(tmp_path):
    session = Reporting(tmp_path)
    listening = Listening(session)
    session.reporter.write_failure(TrainState(), RuntimeError("lost"), 1)
    session.reporter.end_tracking(0, limit_seconds=30)
    assert listening.ends == [(1, 5.0)]


def test_cost_includes_lost_steps_and_earlier_attempts(tmp_path):
    first = Reporting(tmp_path, per_hour_usd=100.0)
    first.reporter.start(TrainState())
    saved = first.step(TrainState(step=10), seconds=36.0)
    first.clock.now += 72.0  # it fails here, after more steps that were not saved
    first.reporter.write_failure(saved, RuntimeError("nothing was saved"), 1)
    second = Reporting(tmp_path, per_hour_usd=200.0)
    second.reporter.begin(saved)
    state = second.step(TrainState(step=11), seconds=18.0)
    assert (state.seconds, state.cost_usd) == (126.0, pytest.approx(4.0))


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
    tmp_path, monkeypatch, sampled, command_began, lost
):
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
def test_all_records_have_the_same_final_cost(tmp_path, fails):
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


def test_without_a_price_the_cost_does_not_change(tmp_path):
    session = Reporting(tmp_path)
    assert session.step(TrainState(step=1), seconds=9.0).cost_usd is None
    session.reporter.begin(TrainState(seconds=1.0, cost_usd=4.5))
    assert session.step(TrainState(step=2), seconds=9.0).cost_usd == 4.5


def test_speed_mfu_and_time_left_by_hand(tmp_path):
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

    session.clock.now += 1.0
    session.meter.lap("step")
    session.clock.now += 3.0  # the device is behind: reading the loss waits for it
    session.reporter.step(TrainState(step=42), [torch.tensor([3.0])], 0.0)
    assert session.records()[2]["step_seconds"] == 4.0


def test_the_warm_up_of_the_batch_by_hand(tmp_path):
    plan = dataclasses.replace(PLAN, warmup_steps=3)  # 1, 1, 2, 3 passes
    session = Reporting(tmp_path, plan=plan)
    state = TrainState().after_step(session.plan, Position())
    session.step(state, seconds=2.0, work=1 / 3)
    record = session.records()[0]
    assert (record["tokens"], record["tokens_per_second"]) == (200, 100.0)
    assert record["mfu_fraction"] == pytest.approx(100 / 1200)
    assert record["seconds_left"] == pytest.approx((1 + 2 + 97 * 3) * 2.0)  # two seconds a pass


def test_the_time_left_is_accurate_for_uneven_steps(tmp_path):
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


def test_an_impossible_mfu_is_omitted_with_one_warning(tmp_path, caplog):
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


def test_waits_are_booked_since_the_last_line_also_after_a_rewind(tmp_path):
    session = Reporting(tmp_path)
    session.reporter.start(TrainState())
    for step, waited in ((1, 2.0), (2, 7.0), (3, 7.0)):
        session.step(TrainState(step=step), seconds=10.0, waited=waited)
    session.reporter.start(TrainState())  # the loader counts from 0 again
    session.step(TrainState(step=1), seconds=10.0, waited=3.0)
    shares = [record["data_wait_fraction"] for record in session.records()]
    assert shares == pytest.approx([0.2, 0.5, 0.0, 0.3])
    records = session.records("performance_metrics")
    spent = [record["data_wait_seconds"] for record in records if record["kind"] != "start"]
    assert spent == pytest.approx([0.0, 2.0, 5.0, 0.0, 0.0, 3.0])


@given(
    step=st.integers(1, 60),
    more=st.integers(0, 60),
    interval=st.integers(0, 20),
    saves=st.integers(0, 20),
    save_best=st.booleans(),
)
def test_the_remaining_actions_are_those_of_the_loop(step, more, interval, saves, save_best):
    total = step + more
    cadence = Cadence(log=1, validation=interval, checkpoint=saves, save_best=save_best)
    to_come = range(step, total + 1)  # a step's validation and save come after its log line
    validations = [one for one in to_come if one == total or cadence.due("validation", one)]
    saved = {one for one in to_come if one == total or cadence.due("checkpoint", one)}
    ahead = cadence.ahead(step, total, PLAN)
    assert ahead["step"] == more
    assert ahead["validation"] == len(validations)
    assert ahead["save"] == len(saved | set(validations) if save_best else saved)
