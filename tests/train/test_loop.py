"""The order of the loop: steps, reports, validations, saves; stops and resumes."""

import dataclasses

import pytest
from run_fakes import (
    Clock,
    FakeEngine,
    FakeLoader,
    FakeReporter,
    FakeSaver,
    Log,
    Saving,
    batch,
    happened,
    rate,
    trainer_of,
)
from thread_ranks import on_two_ranks, results

from refocused.checkpoints.resume.catalog import Catalog
from refocused.config.cadence import Cadence
from refocused.data.order.sequences import Position
from refocused.engine.finite_updates import UpdateOutcome
from refocused.metrics.meter import Meter
from refocused.system.world import World
from refocused.train.step.loop import label_weights, train
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopReason

NEVER = Cadence(log=0, validation=0, checkpoint=0)


def every(**intervals):
    return dataclasses.replace(NEVER, **intervals)


def trained(total, cadence=NEVER, *, stop_when=None, **changes):
    log: Log = []
    saver = FakeSaver(log)
    changes |= {"cadence": cadence, "saver": saver, "stop_when": stop_when}
    return log, saver, *train(trainer_of(log, total_steps=total, **changes), TrainState())


@pytest.mark.parametrize(
    ("total", "cadence", "words", "expected"),
    [
        (
            2,
            every(log=1),
            "accumulate update report validate tell save close",
            [
                *("accumulate 0", "accumulate 1", rate(0, 2), "report 1"),
                *("accumulate 2", "accumulate 3", rate(1, 2), "report 2"),
                *("validate", "tell 2.0", "save 2", "close"),
            ],
        ),
        (
            7,
            every(log=3, validation=4, checkpoint=2),
            "report tell save",
            [
                *("save 2", "report 3", "tell 2.0", "save 4"),
                *("report 6", "save 6", "report 7", "tell 2.0", "save 7"),
            ],
        ),
        (
            2,
            every(log=2, validation=2, checkpoint=2),
            "report tell save",
            ["report 2", "tell 2.0", "save 2"],
        ),
    ],
    ids=["steps", "intervals", "the last step"],
)
def test_due_actions_run_in_this_order(total, cadence, words, expected):
    log, _, state, stopped = trained(total, cadence)
    assert happened(log, *words.split()) == expected
    assert (state.tokens, state.position) == (total * 8, Position(0, 2 * total))
    assert stopped is StopReason.NONE


def test_a_report_covers_all_steps_since_the_last_one():
    reporter = FakeReporter([])
    engine = FakeEngine([], training_loss=float)
    cadence = every(log=2, validation=2, checkpoint=2)
    _, saver, state, _ = trained(5, cadence, reporter=reporter, engine=engine)
    assert reporter.reported == [[1.0, 2.0], [3.0, 4.0], [5.0]]
    saved = [(one.step, one.loss, one.validation_loss) for one in saver.saved]
    assert saved == [(2, 2.0, 2.0), (4, 4.0, 2.0), (5, 5.0, 2.0)]
    assert (state.best_loss, state.best_step) == (2.0, 2)


def improving(*losses):
    """An engine with these validation losses, in order."""
    found = iter(losses)
    return FakeEngine([], validation=lambda inputs, labels: next(found))


@pytest.mark.parametrize(
    ("total", "cadence", "losses", "reasons"),
    [
        (
            7,
            every(checkpoint=3, keep_epochs=True),  # an epoch is two steps
            (2.0,),
            {2: "epoch", 3: "rolling", 4: "epoch", 6: "rolling epoch", 7: "final"},
        ),
        (
            9,
            every(validation=2, checkpoint=4, save_best=True),
            (3.0, 2.0, 1.0, 5.0, 0.5),
            {2: "best", 4: "rolling best", 6: "best", 8: "rolling", 9: "final best"},
        ),
        (
            9,
            every(validation=2, checkpoint=4),
            (3.0, 2.0, 1.0, 5.0, 0.5),
            {4: "rolling", 8: "rolling", 9: "final"},
        ),
    ],
)
def test_every_save_has_its_reasons_and_only_the_last_is_waited_for(
    total, cadence, losses, reasons
):
    loader = FakeLoader([], sequences_per_epoch=4)
    _, saver, *_ = trained(total, cadence, engine=improving(*losses), loader=loader)
    steps = [state.step for state in saver.saved]
    assert dict(zip(steps, map(" ".join, saver.reasons), strict=True)) == reasons
    assert saver.waited == [step == total for step in steps]
    assert saver.commits == total  # each step commits what has been written


def test_the_best_step_has_a_checkpoint_with_reason_best(tmp_path):
    cadence = every(validation=2, checkpoint=5, save_best=True)
    engine = improving(3.0, 2.5, 2.75, 2.0, 2.25)  # after the steps 2, 4, 6, 8 and 10
    saver = Saving(tmp_path).saver
    trainer = trainer_of([], total_steps=10, cadence=cadence, engine=engine, saver=saver)
    state, _ = train(trainer, TrainState())
    assert (state.best_loss, state.best_step) == (2.0, 8)
    steps = {entry.step: entry for entry in Catalog(tmp_path).entries()}
    (best,) = (entry for entry in steps.values() if "best" in entry.notes)
    assert (best.step, best.validation_loss, best.tiers) == (8, 2.0, ("best",))
    # The best ones before it went; a step has its own validation's loss or none.
    assert {step: entry.validation_loss for step, entry in steps.items()} == {
        **{5: None, 8: 2.0, 10: 2.25}
    }


def test_saves_and_validations_do_not_include_step_time():
    clock = Clock()

    class SlowOutcome(UpdateOutcome):
        def was_finite(self):
            clock.now += 5.0  # the device computes the step
            return super().was_finite()

    class SlowEngine(FakeEngine):
        def update(self, learning_rate, judge, **others):
            super().update(learning_rate, judge)
            return SlowOutcome(True)

        def validation_loss(self, input_ids, labels):
            clock.now += 2.0
            return super().validation_loss(input_ids, labels)

    class SlowSaver(FakeSaver):
        def save(self, state, reasons, *, wait=True):
            clock.now += 1.0
            trainer.meter.lap("save")
            return super().save(state, reasons, wait=wait)

    trainer = trainer_of(
        [],
        engine=SlowEngine([]),
        saver=SlowSaver([]),
        meter=Meter(clock),
        cadence=every(validation=3, checkpoint=2),
    )
    train(trainer, TrainState())
    laps = trainer.meter.laps
    assert (laps["step"], laps["validation"], laps["save"]) == (6 * 5.0, 2 * 2.0, 3 * 1.0)


@pytest.mark.parametrize(
    ("cadence", "when", "happens", "reasons"),
    [
        (every(checkpoint=3), "accumulate 5", ["report 3", "save 3"], [["rolling"]]),
        (NEVER, "accumulate 1", ["report 1", "save 1"], [["emergency"]]),
        (every(validation=2), "validate", ["validate", "save 2"], [["emergency"]]),
    ],
    ids=["where a save is due", "between", "in a validation"],
)
def test_a_stop_saves_once_and_ends(cadence, when, happens, reasons):
    batches = [batch(0), batch(1)]
    log, saver, state, stopped = trained(
        6, cadence, stop_when=when, validation_batches=lambda: iter(batches)
    )
    assert happened(log, "validate", "tell", *{word.split()[0] for word in happens}) == happens
    assert log[-1] == "close"
    assert (saver.reasons, saver.waited) == (reasons, [True])
    assert (stopped, state.validation_loss) == (StopReason.SIGNAL, None)


@pytest.mark.parametrize(("missing_from", "there"), [(0, []), (2, ["report 1", "save 1"])])
def test_a_stop_during_the_wait_for_data_saves_once(missing_from, there):
    log: Log = []
    loader = FakeLoader(log, missing_from=missing_from)
    trainer = trainer_of(log, cadence=every(log=1), loader=loader, stop_when="waits")
    state, stopped = train(trainer, TrainState())
    assert happened(log, "report", "save") == there
    assert log[-1] == "close"
    assert (state.step, stopped) == (missing_from // 2, StopReason.SIGNAL)


def test_every_label_of_a_step_counts_the_same():
    counted = ([10, 2], [4, 0])
    found = results(on_two_ranks(lambda world: label_weights(world, counted[world.rank])))
    assert found == [[10 / 4, 2 / 4], [4 / 4, 0.0]]
    # The mean over micro-batches of weight x mean loss is the mean over all labels.
    means = ([1.0, 5.0], [2.0, 0.0])
    weighted = [w * m for rank in (0, 1) for w, m in zip(found[rank], means[rank], strict=True)]
    assert sum(weighted) / 4 == pytest.approx((10 * 1.0 + 2 * 5.0 + 4 * 2.0) / 16)
    assert label_weights(World(), [0, 0]) == [1.0, 1.0]  # no weight that is not finite
    apart = World(rank=0, local_rank=0, world_size=2, local_world_size=2)
    assert label_weights(apart, [None, None]) == [1.0, 1.0]  # without communication
