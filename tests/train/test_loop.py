"""What the loop does in which order: steps, reports, validations, saves; stops and resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from loop_session import happened, rate, run
from run_fakes import (
    Clock,
    FakeEngine,
    FakeLoader,
    FakeReporter,
    FakeSaver,
    FakeStop,
    Log,
    batch,
    parts_of,
)
from saver_session import Session
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.data.order.position import Position
from refocused.engine.finite_updates import Verdict
from refocused.metrics.throughput import Throughput
from refocused.system.errors import ShardError
from refocused.system.world import World
from refocused.train.step.loop import Outcome, label_weights, train
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import Cadence
from refocused.train.step.stopping import StopReason, StopRequest


def saver_of(parts: Parts) -> FakeSaver:
    return cast("FakeSaver", parts.saver)


def test_a_step_accumulates_all_its_passes_and_then_updates() -> None:
    log: Log = []
    outcome = run(
        parts_of(log, total_steps=2, cadence=Cadence(log=1, validation=0, checkpoint=0)), log
    )
    assert log == [
        *("accumulate 0", "accumulate 1", rate(0, 2), "report 1"),
        *("accumulate 2", "accumulate 3", rate(1, 2), "report 2"),
        *("validate", "tell 2.0", "save 2", "close"),
    ]
    assert outcome.state.tokens == 2 * 8
    assert outcome.state.position == Position(0, 4)
    assert outcome.stopped is StopReason.NONE


def test_weights_and_gradient_are_described_before_the_update_of_a_step() -> None:
    log: Log = []
    cadence = Cadence(log=0, validation=0, checkpoint=0, histograms=2)
    run(parts_of(log, total_steps=3, cadence=cadence), log)
    assert log[:9] == [
        *("accumulate 0", "accumulate 1", rate(0, 3)),
        *("accumulate 2", "accumulate 3", "describe", "draw 2", rate(1, 3)),
        "accumulate 4",
    ]


def test_reports_validations_and_saves_come_when_they_are_due() -> None:
    log: Log = []
    run(parts_of(log, total_steps=7, cadence=Cadence(log=3, validation=4, checkpoint=2)), log)
    assert happened(log, "report", "tell", "save") == [
        *("save 2", "report 3", "tell 2.0", "save 4"),
        *("report 6", "save 6", "report 7", "tell 2.0", "save 7"),
    ]


def test_a_report_is_of_all_steps_since_the_one_before() -> None:
    log: Log = []
    parts = parts_of(
        log,
        total_steps=5,
        engine=FakeEngine(log, training_loss=float),
        cadence=Cadence(log=2, validation=0, checkpoint=0),
    )
    run(parts, log)
    assert cast("FakeReporter", parts.reporter).reported == [[1.0, 2.0], [3.0, 4.0], [5.0]]


def test_the_last_step_is_reported_validated_and_saved_once_also_when_that_was_due() -> None:
    log: Log = []
    run(parts_of(log, total_steps=2, cadence=Cadence(log=2, validation=2, checkpoint=2)), log)
    assert happened(log, "report", "tell", "save") == ["report 2", "tell 2.0", "save 2"]


def test_what_is_saved_holds_the_validation_before_it() -> None:
    log: Log = []
    parts = parts_of(log, total_steps=4, cadence=Cadence(log=1, validation=2, checkpoint=2))
    outcome = run(parts, log)
    saved = saver_of(parts).saved
    assert [(state.step, state.loss, state.validation_loss) for state in saved] == [
        (2, 1.0, 2.0),
        (4, 1.0, 2.0),
    ]
    assert (outcome.state.best_loss, outcome.state.best_step) == (2.0, 2)


def test_every_save_is_labelled_with_its_reasons() -> None:
    log: Log = []
    cadence = Cadence(log=0, validation=0, checkpoint=3, keep_epochs=True)
    loader = FakeLoader(log, windows_per_epoch=4)  # two steps
    parts = parts_of(log, total_steps=7, cadence=cadence, loader=loader)
    run(parts, log)
    saver = saver_of(parts)
    labels = dict(zip((state.step for state in saver.saved), saver.tiers, strict=True))
    assert labels == {
        2: ["epoch"],
        3: ["rolling"],
        4: ["epoch"],
        6: ["rolling", "epoch"],
        7: ["final"],
    }


def improving(*losses: float) -> FakeEngine:
    """An engine whose validations find these losses, one after another."""
    found = iter(losses)
    return FakeEngine([], validation=lambda inputs, labels: next(found))


def test_the_step_that_the_run_calls_best_is_the_checkpoint_called_best(tmp_path: Path) -> None:
    cadence = Cadence(log=0, validation=2, checkpoint=5, save_best=True)
    saver = Session(tmp_path).saver
    engine = improving(3.0, 2.5, 2.75, 2.0, 2.25)  # after the steps 2, 4, 6, 8 and 10
    outcome = run(parts_of([], total_steps=10, cadence=cadence, engine=engine, saver=saver), [])
    assert (outcome.state.best_loss, outcome.state.best_step) == (2.0, 8)
    steps = {entry.step: entry for entry in Catalog(tmp_path).entries()}
    (best,) = (entry for entry in steps.values() if "best" in entry.notes)
    assert (best.step, best.validation_loss, best.tiers) == (8, 2.0, ("best",))
    # The best ones before it went; a step has its own validation's loss or none.
    assert {step: entry.validation_loss for step, entry in steps.items()} == {
        **{5: None, 8: 2.0, 10: 2.25}
    }


@pytest.mark.parametrize("save_best", [True, False])
def test_a_new_best_is_saved_once_where_that_is_wanted(save_best: bool) -> None:
    cadence = Cadence(log=0, validation=2, checkpoint=4, save_best=save_best)
    parts = parts_of([], total_steps=9, cadence=cadence, engine=improving(3.0, 2.0, 1.0, 5.0, 0.5))
    run(parts, [])
    saver = saver_of(parts)
    labels = dict(zip((state.step for state in saver.saved), saver.tiers, strict=True))
    rest = {8: ["rolling"]}
    assert labels == (
        {2: ["best"], 4: ["rolling", "best"], 6: ["best"], **rest, 9: ["final", "best"]}
        if save_best
        else {4: ["rolling"], **rest, 9: ["final"]}
    )


def test_only_the_last_save_is_waited_for_and_each_step_commits_what_is_written() -> None:
    parts = parts_of([], total_steps=7, cadence=Cadence(log=0, validation=0, checkpoint=3))
    run(parts, [])
    saver = saver_of(parts)
    assert [state.step for state in saver.saved] == [3, 6, 7]
    assert saver.waited == [False, False, True]
    assert saver.commits == 7


def test_neither_a_save_nor_a_validation_is_charged_with_the_step_before_it() -> None:
    clock = Clock()

    class SlowVerdict(Verdict):
        def was_made(self) -> bool:
            clock.now += 5.0  # the device computes the step
            return super().was_made()

    class SlowEngine(FakeEngine):
        def update(self, learning_rate: float) -> Verdict:
            super().update(learning_rate)
            return SlowVerdict(True)

        def validation_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            clock.now += 2.0
            return super().validation_loss(input_ids, labels)

    class SlowSaver(FakeSaver):
        def save(
            self, state: TrainState, reasons: Sequence[SaveReason], *, wait: bool = True
        ) -> TrainState:
            clock.now += 1.0
            parts.throughput.lap("save")
            return super().save(state, reasons, wait=wait)

    parts = parts_of(
        [],
        engine=SlowEngine([]),
        saver=SlowSaver([]),
        throughput=Throughput(clock),
        cadence=Cadence(log=0, validation=3, checkpoint=2),
    )
    run(parts, [])
    laps = parts.throughput.laps
    assert (laps["step"], laps["validation"], laps["save"]) == (6 * 5.0, 2 * 2.0, 3 * 1.0)


def test_a_stop_in_the_middle_reports_and_saves_once_and_ends() -> None:
    log: Log = []
    cadence = Cadence(log=0, validation=0, checkpoint=3)
    outcome = run(parts_of(log, cadence=cadence), log, stop_when="accumulate 5")
    assert happened(log, "report", "tell", "save", "close") == ["report 3", "save 3", "close"]
    assert outcome.state.step == 3
    assert outcome.stopped is StopReason.SIGNAL


def test_a_save_for_a_stop_is_waited_for() -> None:
    log: Log = []
    parts = parts_of(log, total_steps=7, cadence=Cadence(log=0, validation=0, checkpoint=3))
    run(parts, log, stop_when="accumulate 5")
    assert saver_of(parts).waited == [True]


def test_a_stop_is_an_emergency() -> None:
    log: Log = []
    parts = parts_of(log)
    run(parts, log, stop_when="accumulate 1")
    assert saver_of(parts).tiers == [["emergency"]]


def test_a_stop_during_a_validation_cuts_it_short_and_saves() -> None:
    log: Log = []
    cadence = Cadence(log=0, validation=2, checkpoint=0)
    parts = parts_of(log, cadence=cadence, validation=lambda: iter([batch(0), batch(1)]))
    outcome = run(parts, log, stop_when="validate")
    assert happened(log, "validate", "tell", "save") == ["validate", "save 2"]
    assert outcome.state.validation_loss is None
    assert outcome.stopped is StopReason.SIGNAL


def test_a_stop_before_the_first_step_does_nothing() -> None:
    log: Log = ["already"]
    outcome = run(parts_of(log), log, stop_when="already")
    assert log == ["already", "close"]
    assert outcome.stopped is StopReason.SIGNAL


def test_a_finished_run_takes_no_step() -> None:
    log: Log = []
    state = TrainState(step=6, position=Position(0, 12), validation_step=6)
    assert run(parts_of(log), log, state=state).state == state
    assert log == ["close"]


def test_a_resumed_run_goes_on_where_it_stood() -> None:
    log: Log = []
    run(parts_of(log), log, state=TrainState(step=4, tokens=32, position=Position(0, 8)))
    assert happened(log, "accumulate", "update") == [
        *("accumulate 8", "accumulate 9", rate(4, 6)),
        *("accumulate 10", "accumulate 11", rate(5, 6)),
    ]


def test_a_stop_at_the_last_step_saves_it_and_the_next_session_validates() -> None:
    log: Log = []
    parts = parts_of(log, total_steps=2)
    outcome = run(parts, log, stop_when="accumulate 3")
    assert happened(log, "validate", "tell", "save") == ["save 2"]
    assert outcome.stopped is StopReason.SIGNAL
    assert (outcome.state.step, outcome.state.validation_step) == (2, None)

    log.clear()
    outcome = run(parts, log, state=outcome.state)
    assert log == ["validate", "tell 2.0", "close"]
    assert (outcome.stopped, outcome.state.best_step) == (StopReason.NONE, 2)


def test_a_stop_where_a_validation_was_due_leaves_it_to_the_next_session() -> None:
    log: Log = []
    parts = parts_of(log, total_steps=3, cadence=Cadence(log=0, validation=2, checkpoint=0))
    outcome = run(parts, log, stop_when="accumulate 3")
    assert happened(log, "validate", "save") == ["save 2"]

    log.clear()
    outcome = run(parts, log, state=outcome.state)
    assert happened(log, "validate", "update", "save") == [
        *("validate", rate(2, 3), "validate", "save 3")
    ]
    assert outcome.state.validation_step == 3


def test_bad_data_on_one_rank_is_raised_on_both_before_any_pass_of_that_step() -> None:
    logs: list[Log] = [[], []]

    def action(world: World) -> None:
        log = logs[world.rank]
        failing = {2: ShardError("b.npy is corrupt")} if world.rank == 1 else {}
        run(parts_of(log, world=world, loader=FakeLoader(log, failing)), log)

    for ended, log in zip(on_two_ranks(action), logs, strict=True):
        assert isinstance(ended.error, ShardError)
        assert str(ended.error) == "rank 1: b.npy is corrupt"
        assert ended.error.on_every_rank
        assert log == ["accumulate 0", "accumulate 1", rate(0, 6), "close"]


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("late", [0, 1])
def test_a_stop_ends_the_wait_of_one_rank_on_both_after_the_step_before(
    late: int, asked: int
) -> None:
    logs: list[Log] = [[], []]

    def action(world: World) -> Outcome:
        log = logs[world.rank]
        loader = FakeLoader(log, missing_from=4 if world.rank == late else 10**9)
        parts = parts_of(log, world=world, loader=loader)
        # Asked for on one rank, which has its batches or not, after the other has waited.
        stop = OneAsks(logs[late], "waits", world=world, asks=world.rank == asked)
        return train(parts, TrainState(), cast("StopRequest", stop))

    outcomes = results(on_two_ranks(action))
    for outcome, log in zip(outcomes, logs, strict=True):
        assert happened(log, "update") == [rate(0, 6), rate(1, 6)]
        assert log[-3:] == ["report 2", "save 2", "close"]
        assert (outcome.state.step, outcome.state.position) == (2, Position(0, 4))
        assert outcome.stopped is StopReason.SIGNAL
    assert logs[1 - late] == [entry for entry in logs[late] if entry != "waits"]


@dataclasses.dataclass
class OneAsks(FakeStop):
    """A reason to stop on one of the ranks, agreed on by all."""

    world: World = dataclasses.field(default_factory=World)
    asks: bool = True

    def agreed(self) -> StopReason:
        own = super().agreed() if self.asks else StopReason.NONE
        return StopReason(int(self.world.largest([own])[0]))


def test_a_stop_before_the_data_of_the_first_step_saves_nothing() -> None:
    log: Log = []
    outcome = run(parts_of(log, loader=FakeLoader(log, missing_from=0)), log, stop_when="waits")
    assert log == ["waits", "close"]
    assert (outcome.state, outcome.stopped) == (TrainState(), StopReason.SIGNAL)


def test_a_step_that_was_reported_and_saved_is_not_reported_again_when_the_next_waits() -> None:
    log: Log = []
    cadence = Cadence(log=1, validation=0, checkpoint=1)
    parts = parts_of(log, cadence=cadence, loader=FakeLoader(log, missing_from=2))
    run(parts, log, stop_when="waits")
    assert happened(log, "report") == ["report 1"]


def test_every_label_of_a_step_counts_the_same() -> None:
    counted = ([10, 2], [4, 0])
    found = results(on_two_ranks(lambda world: label_weights(world, counted[world.rank])))
    assert found == [[10 / 4, 2 / 4], [4 / 4, 0.0]]
    # The mean over micro-batches of weight x mean loss is the mean over all labels.
    means = ([1.0, 5.0], [2.0, 0.0])
    weighted = [w * m for rank in (0, 1) for w, m in zip(found[rank], means[rank], strict=True)]
    assert sum(weighted) / 4 == pytest.approx((10 * 1.0 + 2 * 5.0 + 4 * 2.0) / 16)


def test_a_step_without_any_label_has_no_weights_that_are_not_finite() -> None:
    alone = World(rank=0, local_rank=0, world_size=1, local_world_size=1)
    assert label_weights(alone, [0, 0]) == [1.0, 1.0]


def test_where_no_label_is_ignored_the_ranks_need_not_talk() -> None:
    apart = World(rank=0, local_rank=0, world_size=2, local_world_size=2)
    assert label_weights(apart, [None, None]) == [1.0, 1.0]
