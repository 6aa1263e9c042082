"""The reporter: records and messages in files, on the screen and in trackers."""

import math
import os
import socket
from pathlib import Path

import pytest
import torch
from run_fakes import OPTIMIZER, FakeEngine, Listening, Reporting
from thread_ranks import on_two_ranks, results

from refocused.data.order.sequences import Position
from refocused.metrics.meter import MARKED_EVERY
from refocused.metrics.rank_times import WINDOW
from refocused.metrics.trackers import Histogram
from refocused.system.world import World
from refocused.train.step.state import TrainState

pytestmark = pytest.mark.usefixtures("screen")


def test_a_step_is_recorded_with_the_engines_figures(tmp_path: Path) -> None:
    engine = FakeEngine([], norm=0.75, scale=4096.0, skipped_steps=3)
    session = Reporting(tmp_path, engine=engine)
    session.step(TrainState(step=1, position=Position(2, 5)), seconds=1.0)
    (record,) = session.records()
    names = ("kind", "gradient_norm", "loss_scale", "skipped_steps", "epoch", "gpu_memory_fraction")
    assert [record[name] for name in names] == ["step", 0.75, 4096.0, 3, 2, None]
    assert record["learning_rate"] == OPTIMIZER.lr / 2  # of the step itself
    assert "sources" not in record


def test_a_validation_is_reported_with_its_perplexity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Reporting(tmp_path)
    best = TrainState(step=1500, tokens=90).after_validation(2.0)
    session.reporter.validation(best, 12.4, {})
    worse = TrainState(step=1600, best_loss=1.0, validation_set="").after_validation(3.0)
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


def test_losses_are_means_over_ranks_and_steps_written_by_rank_0(tmp_path: Path) -> None:
    def action(world: World) -> list[float | None]:
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
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phase: str, waited: float
) -> None:
    def action(world: World) -> None:
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


def test_the_state_file_has_the_progress_of_the_run(tmp_path: Path) -> None:
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


def test_a_line_reads_the_device_once(tmp_path: Path) -> None:
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


def test_trackers_get_every_record(tmp_path: Path) -> None:
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


def test_trackers_are_closed_once(tmp_path: Path) -> None:
    session = Reporting(tmp_path)
    listening = Listening(session)
    session.reporter.write_failure(TrainState(), RuntimeError("lost"), 1)
    session.reporter.end_tracking(0, limit_seconds=30)
    assert listening.ends == [(1, 5.0)]
