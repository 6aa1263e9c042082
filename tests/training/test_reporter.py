from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from run_fakes import OPTIMIZER, SCHEDULE, Clock, FakeEngine
from thread_ranks import on_two_ranks, results

from refocused.batches.position import Position
from refocused.config.batch_plan import BatchPlan
from refocused.engine.engine import Engine
from refocused.engine.histograms import Histograms, ParameterHistogram
from refocused.engine.schedule import learning_rate
from refocused.monitoring.step_phases import step_phases
from refocused.monitoring.throughput import Throughput
from refocused.monitoring.time_book import TimeBook
from refocused.monitoring.trackers import Record, Trackers, histograms
from refocused.training.cadence import Cadence
from refocused.training.reporter import Reporter
from refocused.training.state import TrainState
from refocused.training.step_figures import RunFigures
from refocused.world import World

PLAN = BatchPlan(micro=2, accumulation=3, world_size=1, sequence_length=100)  # 600 tokens


class Session:
    """A reporter with a clock and an engine that the test moves."""

    def __init__(
        self,
        folder: Path,
        *,
        per_hour_usd: float | None = None,
        world: World | None = None,
        epoch_windows: dict[str, int] | None = None,
    ) -> None:
        self.folder = folder
        self.clock = Clock()
        self.engine = FakeEngine([])
        self.throughput = Throughput(self.clock)
        self.phases = step_phases("cpu", self.clock)
        self.reporter = Reporter(
            folder,
            figures=RunFigures(
                name="sample",
                total_steps=100,
                plan=PLAN,
                optimizer=OPTIMIZER,
                schedule=SCHEDULE,
                cadence=Cadence(log=1, validation=50, checkpoint=25),
                mfu=lambda speed: speed / 1200,
                per_hour_usd=per_hour_usd,
                epoch_windows=epoch_windows or {},
            ),
            engine=cast("Engine", self.engine),
            throughput=self.throughput,
            time_book=TimeBook(self.throughput, self.phases),
            world=world or World(),
        )

    def step(
        self, state: TrainState, *, seconds: float, waited: float = 0.0, loss: float = 3.0
    ) -> TrainState:
        self.clock.now += seconds
        self.throughput.lap("step")
        return self.reporter.step(state, torch.tensor(loss), waited)

    def records(self, file: str = "training_metrics") -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / f"{file}.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=refuse_constant) for line in lines]

    def state_file(self) -> dict[str, Any]:
        text = (self.folder / "state.json").read_text()
        found: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
        return found


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(autouse=True)
def screen(heard: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="refocused")


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
        session.phases.begin()
        session.clock.now += 5.0
        session.phases.passes_made()
        session.clock.now += 2.0
        session.phases.end()
        session.throughput.lap("step")
    session.clock.now += 0.5
    session.reporter.step(TrainState(step=6), torch.tensor(3.0), 2.0)
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
    assert session.records()[1]["seconds_left"] == 59 * 2.0 + 2 * 5.0 + 3 * 7.0


def test_the_share_of_waiting_is_of_the_time_since_the_last_line(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.step(TrainState(step=1), seconds=10.0, waited=2.0)
    session.step(TrainState(step=2), seconds=10.0, waited=7.0)
    session.step(TrainState(step=3), seconds=10.0, waited=7.0)
    shares = [record["data_wait_fraction"] for record in session.records()]
    assert shares == pytest.approx([0.2, 0.5, 0.0])


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


def test_an_impossible_mfu_is_left_out_and_doubted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    caplog.set_level(logging.INFO)
    for step in (1, 2):
        session.step(TrainState(step=step), seconds=0.5)  # 1,200 tokens a second: 100 %
    records = [record for record in session.records() if record["kind"] == "step"]
    assert [record["mfu_fraction"] for record in records] == [None, None]
    lines = [record.message for record in caplog.records]
    assert sum("MFU ?" in line for line in lines) == 2
    assert sum("MFU 100% is more than any training" in line for line in lines) == 1


def test_the_state_file_holds_what_else_is_told(tmp_path: Path) -> None:
    session = Session(tmp_path)
    local = iter([3, 4])
    session.reporter.tell_also(lambda: {"shards_local": next(local)})
    session.step(TrainState(step=1), seconds=1.0)
    assert session.state_file()["shards_local"] == 3
    session.step(TrainState(step=2), seconds=1.0)
    assert session.state_file()["shards_local"] == 4


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
