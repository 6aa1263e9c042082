"""What a reporter tells of steps, validations and events: to files, the screen and trackers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import cast

import pytest
import torch
from reporter_session import Session
from run_fakes import OPTIMIZER, SCHEDULE
from thread_ranks import on_two_ranks, results

from refocused.data.order.position import Position
from refocused.engine.histograms import Histograms, ParameterHistogram
from refocused.engine.schedule import learning_rate
from refocused.metrics.trackers import Record, Trackers, histograms
from refocused.system.world import World
from refocused.train.step.state import TrainState

pytestmark = pytest.mark.usefixtures("screen")


def test_the_learning_rate_is_that_of_the_step_itself(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.step(TrainState(step=1), seconds=1.0)
    first = learning_rate(0, peak=OPTIMIZER.lr, total_steps=100, schedule=SCHEDULE)
    assert session.records()[0]["learning_rate"] == first == OPTIMIZER.lr / 2


def test_what_the_engine_tells_is_passed_on(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.engine.norm, session.engine.scale, session.engine.skipped_steps = 0.75, 4096.0, 3
    session.step(TrainState(step=1, position=Position(2, 5)), seconds=1.0)
    record = session.records()[0]
    names = ("kind", "gradient_norm", "loss_scale", "skipped_steps", "epoch", "gpu_memory_fraction")
    assert [record[name] for name in names] == ["step", 0.75, 4096.0, 3, 2, None]


def test_the_progress_of_each_source_is_told_with_every_step(tmp_path: Path) -> None:
    session = Session(tmp_path, epoch_windows={"code": 8, "web": 50})
    state = TrainState(step=4, position=Position(0, 24, {"code": 12, "web": 12}))
    session.step(state, seconds=1.0)
    assert session.records()[0]["sources"] == {
        "code": {"tokens": 1200, "epoch": 1.5},
        "web": {"tokens": 1200, "epoch": 0.24},
    }
    alone = Session(tmp_path / "alone")
    alone.step(TrainState(step=4, position=Position(0, 24)), seconds=1.0)
    assert "sources" not in alone.records()[0]


def test_a_validation_is_told_with_its_perplexity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    best = TrainState(step=1500, tokens=90).after_validation(2.0)
    session.reporter.validation(best, 12.4, {})
    worse = TrainState(step=1600, best_loss=1.0).after_validation(3.0)
    session.reporter.validation(worse, 150.0, {"code": 2.5, "web": 3.25})
    assert [record.message for record in caplog.records] == [
        "eval   1,500 val 2.0000 ppl 7.39 (best) | 12 s",
        "eval   1,600 val 3.0000 ppl 20.09 | code 2.5000 | web 3.2500 | 2.5 min",
    ]
    record, mixed = session.records()
    assert (record["step"], record["tokens"], record["seconds"]) == (1500, 90, 12.4)
    assert record["perplexity"] == pytest.approx(math.exp(2.0))
    assert "sources" not in record
    assert mixed["sources"] == {"code": {"validation_loss": 2.5}, "web": {"validation_loss": 3.25}}


def test_events_are_written_and_failures_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    session.reporter.event("start", "from step 0")
    session.reporter.event("save_failed", "disk full", step=3)
    session.reporter.event("finished", "", exit_code=0)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "from step 0"),
        ("WARNING", "disk full"),
    ]
    events = session.records("events")
    assert [(event["kind"], event["text"]) for event in events] == [
        ("start", "from step 0"),
        ("save_failed", "disk full"),
        ("finished", ""),
    ]
    assert (events[1]["step"], events[2]["exit_code"]) == (3, 0)


def test_numbers_that_json_does_not_know_are_null_in_every_file(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.engine.norm = math.inf  # after an overflow
    state = session.step(TrainState(step=1), seconds=1.0, loss=math.nan)
    state = state.after_validation(math.inf)
    session.reporter.validation(state, 1.0, {"web": math.nan})
    session.reporter.write_state(state, "training")
    step, validation = session.records()
    assert (step["loss"], step["gradient_norm"]) == (None, None)
    assert (validation["validation_loss"], validation["perplexity"]) == (None, None)
    assert validation["sources"] == {"web": {"validation_loss": None}}
    written = session.state_file()
    assert (written["loss"], written["validation_loss"]) == (None, None)


def test_the_loss_is_the_mean_over_the_ranks_and_rank_0_alone_writes(tmp_path: Path) -> None:
    def action(world: World) -> float | None:
        session = Session(tmp_path / str(world.rank), world=world)
        loss = [1.0, 4.0][world.rank]
        reported = session.step(TrainState(step=1), seconds=1.0, loss=loss).loss
        session.reporter.validation(TrainState(step=1).after_validation(2.0), 1.0, {})
        session.reporter.event("save", "saved")
        session.reporter.write_state(TrainState(), "training")
        session.reporter.close()
        return reported

    assert results(on_two_ranks(action)) == [2.5, 2.5]
    kinds = [record["kind"] for record in Session(tmp_path / "0").records()]
    assert kinds == ["step", "validation"]
    assert not (tmp_path / "1").exists()


def test_the_state_file_tells_other_programs_where_the_run_is(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.step(TrainState(step=40, tokens=24_000, position=Position(0, 80)), seconds=2.0)
    state = session.state_file()
    assert state["run"] == "sample"
    assert state["status"] == "training"
    assert state["pid"] == os.getpid()
    assert (state["step"], state["total_steps"], state["tokens"]) == (40, 100, 24_000)
    assert state["position"] == {"epoch": 0, "windows": 80}
    assert (state["tokens_per_second"], state["seconds_left"]) == (300.0, 120.0)
    session.reporter.write_state(TrainState(step=40), "finished", mirrored=True)
    assert session.state_file()["status"] == "finished"
    assert session.state_file()["mirrored"] is True


def test_the_state_file_holds_what_else_is_told(tmp_path: Path) -> None:
    session = Session(tmp_path)
    local = iter([3, 4])
    session.reporter.add_to_state(lambda: {"shards_local": next(local)})
    session.step(TrainState(step=1), seconds=1.0)
    assert session.state_file()["shards_local"] == 3
    session.step(TrainState(step=2), seconds=1.0)
    assert session.state_file()["shards_local"] == 4


def test_the_mean_since_the_last_line_stands_beside_the_loss_of_the_step(tmp_path: Path) -> None:
    def action(world: World) -> None:
        session = Session(tmp_path / str(world.rank), world=world)
        session.throughput.lap("step")
        mine = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])]  # two steps of two passes
        session.reporter.step(TrainState(step=2), [one + world.rank for one in mine], 0.0)
        session.throughput.lap("step")
        state = session.reporter.step(TrainState(step=3), [torch.tensor([9.0, 9.0])], 0.0)
        assert state.loss == 9.0

    results(on_two_ranks(action))
    first, second = Session(tmp_path / "0").records()
    assert (first["loss"], first["loss_mean"]) == (6.5, 4.5)
    assert (second["loss"], second["loss_mean"]) == (9.0, 9.0)


def test_a_line_reads_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, reads = Session(tmp_path), []
    session.throughput.lap("step")

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.__name__ in ("item", "tolist", "__float__", "cpu", "numpy"):
                reads.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    losses = [torch.ones(2).as_subclass(Counted) for _ in range(5)]
    session.reporter.step(TrainState(step=5), losses, 0.0)
    assert reads == ["tolist"]


class Listening:
    """Stands for the trackers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.ends: list[tuple[int, float]] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def close(self, exit_code: int, *, limit_seconds: float) -> None:
        self.ends.append((exit_code, limit_seconds))


def test_trackers_are_told_of_everything_that_is_measured(tmp_path: Path) -> None:
    session, listening = Session(tmp_path), Listening()
    session.reporter.track(cast("Trackers", listening))
    state = session.step(TrainState(step=40), seconds=2.0)
    session.reporter.validation(state.after_validation(2.0), 1.0, {})
    session.reporter.tasks(state, [], 1.0)
    session.reporter.sample(state, "what it writes", 1.0)
    drawn = ParameterHistogram(-1.0, 1.0, (1, 2), 0.5, 3.0)
    session.reporter.histograms(40, Histograms({"head": drawn}, {}))
    session.reporter.event("save", "saved")
    assert [record["kind"] for record in listening.records] == [
        "step",
        "validation",
        "tasks",
        "sample",
        "histograms",
    ]
    assert {record["step"] for record in listening.records} == {40}
    told = [
        {name: value for name, value in record.items() if name != "time"}
        for record in session.records()
    ]
    assert told == listening.records[:3]
    assert listening.records[3]["sample"] == "what it writes"
    (shown,) = histograms(listening.records[4])
    assert (shown.name, shown.edges, shown.counts) == ("weights/head", [-1.0, 0.0, 1.0], (1, 2))


def test_trackers_end_once_whether_the_run_fails_or_not(tmp_path: Path) -> None:
    session, listening = Session(tmp_path), Listening()
    session.reporter.track(cast("Trackers", listening))
    session.reporter.write_failure(TrainState(), RuntimeError("lost"), 1)
    session.reporter.end_tracking(0, limit_seconds=30)
    assert listening.ends == [(1, 5.0)]
