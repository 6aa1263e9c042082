"""What a reporter tells of a run, its time, speed and cost: to files, the screen and trackers."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fakes import OPTIMIZER, SCHEDULE, Clock, FakeEngine
from thread_ranks import on_two_ranks, results

from refocused.config.batch_plan import BatchPlan
from refocused.data.order.position import Position
from refocused.engine.engine import Engine
from refocused.engine.histograms import Histograms, ParameterHistogram
from refocused.engine.schedule import learning_rate
from refocused.metrics.throughput import Throughput
from refocused.metrics.trackers import Record, Trackers, histograms
from refocused.system.world import World
from refocused.train.step.reporter import Reporter
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import Cadence, RunFigures

pytestmark = pytest.mark.usefixtures("screen")

PLAN = BatchPlan(micro=2, accumulation=3, world_size=1, sequence_length=100)  # 600 tokens


class Session:
    """A reporter with a clock and an engine that the test moves, and the files it writes."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        engine: Any = None,
        more_of_state: Callable[[], dict[str, object]] = dict,
        **figures: Any,
    ) -> None:
        self.folder = folder
        self.clock = Clock()
        self.throughput = Throughput(self.clock)
        given: dict[str, Any] = {
            "name": "sample",
            "total_steps": 100,
            "plan": PLAN,
            "optimizer": OPTIMIZER,
            "schedule": SCHEDULE,
            "cadence": Cadence(log=1, validation=50, checkpoint=25),
            "mfu": lambda speed: speed / 1200,
            "per_hour_usd": None,
        }
        self.reporter = Reporter(
            folder,
            figures=RunFigures(**given | figures),
            engine=cast("Engine", engine or FakeEngine([])),
            throughput=self.throughput,
            world=world or World(),
            more_of_state=more_of_state,
        )

    def step(
        self, state: TrainState, *, seconds: float, waited: float = 0.0, loss: float = 3.0
    ) -> TrainState:
        self.clock.now += seconds
        self.throughput.lap("step")
        return self.reporter.step(state, [torch.tensor([loss])], waited)

    def records(self, file: str = "training_metrics") -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / f"{file}.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=refuse_constant) for line in lines]

    def state_file(self) -> dict[str, Any]:
        text = (self.folder / "state.json").read_text()
        found: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
        return found


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_a_step_is_recorded_with_what_the_engine_says(tmp_path: Path) -> None:
    engine = FakeEngine([], norm=0.75, scale=4096.0, skipped_steps=3)
    session = Session(tmp_path, engine=engine)
    session.step(TrainState(step=1, position=Position(2, 5)), seconds=1.0)
    (record,) = session.records()
    names = ("kind", "gradient_norm", "loss_scale", "skipped_steps", "epoch", "gpu_memory_fraction")
    assert [record[name] for name in names] == ["step", 0.75, 4096.0, 3, 2, None]
    first = learning_rate(0, peak=OPTIMIZER.lr, total_steps=100, schedule=SCHEDULE)
    assert record["learning_rate"] == first == OPTIMIZER.lr / 2  # of the step itself
    assert "sources" not in record


def test_a_validation_is_told_with_its_perplexity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(tmp_path)
    best = TrainState(step=1500, tokens=90).after_validation(2.0)
    session.reporter.validation(best, 12.4, {})
    worse = TrainState(step=1600, best_loss=1.0).after_validation(3.0)
    session.reporter.validation(worse, 150.0, {"code": 2.5, "web": 3.25})
    assert caplog.messages == [
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


def test_losses_are_means_over_ranks_and_steps_and_rank_0_alone_writes(tmp_path: Path) -> None:
    def action(world: World) -> list[float | None]:
        session = Session(tmp_path / str(world.rank), world=world)
        found = []
        two_steps = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])]  # of two passes
        for step, losses in ((2, two_steps), (3, [torch.tensor([9.0, 9.0])])):
            session.throughput.lap("step")
            mine = [one + world.rank for one in losses]
            found.append(session.reporter.step(TrainState(step=step), mine, 0.0).loss)
        session.reporter.validation(TrainState(step=3).after_validation(2.0), 1.0, {})
        session.reporter.event("save", "saved")
        session.reporter.write_state(TrainState(), "training")
        session.reporter.close()
        return found

    assert results(on_two_ranks(action)) == [[6.5, 9.5]] * 2
    first, second, validation = Session(tmp_path / "0").records()
    assert (first["loss"], first["loss_mean"]) == (6.5, 4.5)
    assert (second["loss"], second["loss_mean"]) == (9.5, 9.5)
    assert validation["kind"] == "validation"
    assert not (tmp_path / "1").exists()


def test_the_state_file_tells_other_programs_where_the_run_is(tmp_path: Path) -> None:
    local = iter([3, 4])
    session = Session(tmp_path, more_of_state=lambda: {"shards_local": next(local)})
    session.step(TrainState(step=40, tokens=24_000, position=Position(0, 80)), seconds=2.0)
    state = {
        "run": "sample",
        "status": "training",
        "pid": os.getpid(),
        "step": 40,
        "total_steps": 100,
        "tokens": 24_000,
        "position": {"epoch": 0, "windows": 80},
        "tokens_per_second": 300.0,
        "seconds_left": 120.0,
        "shards_local": 3,
    }
    assert session.state_file().items() >= state.items()
    session.reporter.write_state(TrainState(step=40), "finished", mirrored=True)
    ended = {"status": "finished", "mirrored": True, "shards_local": 4}
    assert session.state_file().items() >= ended.items()


def test_a_line_reads_the_device_once(tmp_path: Path) -> None:
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


def listened(session: Session) -> Listening:
    listening = Listening()
    session.reporter.track(cast("Trackers", listening))
    return listening


def test_trackers_are_told_of_everything_that_is_measured(tmp_path: Path) -> None:
    session = Session(tmp_path)
    listening = listened(session)
    state = session.step(TrainState(step=40), seconds=2.0)
    session.reporter.validation(state.after_validation(2.0), 1.0, {})
    session.reporter.tasks(state, [], 1.0)
    session.reporter.sample(state, "what it writes", 1.0)
    drawn = ParameterHistogram(-1.0, 1.0, (1, 2), 0.5, 3.0)
    session.reporter.histograms(40, Histograms({"head": drawn}, {}))
    session.reporter.event("save", "saved")
    kinds = ["step", "validation", "tasks", "sample", "histograms"]
    assert [(record["kind"], record["step"]) for record in listening.records] == [
        (kind, 40) for kind in kinds
    ]
    for written, told in zip(session.records(), listening.records, strict=False):
        assert {name: value for name, value in written.items() if name != "time"} == told
    assert listening.records[3]["sample"] == "what it writes"
    (shown,) = histograms(listening.records[4])
    assert (shown.name, shown.edges, shown.counts) == ("weights/head", [-1.0, 0.0, 1.0], (1, 2))


def test_trackers_end_once_whether_the_run_fails_or_not(tmp_path: Path) -> None:
    session = Session(tmp_path)
    listening = listened(session)
    session.reporter.write_failure(TrainState(), RuntimeError("lost"), 1)
    session.reporter.end_tracking(0, limit_seconds=30)
    assert listening.ends == [(1, 5.0)]


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
