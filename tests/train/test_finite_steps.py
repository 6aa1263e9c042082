"""Training ends at a loss or a gradient that is not finite, before anything is made of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from loop_session import happened, rate, run
from run_fakes import FakeEngine, FakeLoader, Log, parts_of
from thread_ranks import on_two_ranks

from refocused.system.errors import TrainingError
from refocused.system.world import World
from refocused.train.step.step_figures import Cadence


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_on_one_rank_stops_both_and_nothing_is_updated_or_told(
    value: float,
) -> None:
    logs: list[Log] = [[], []]

    def action(world: World) -> None:
        log = logs[world.rank]
        engine = FakeEngine(
            log,
            training_loss=lambda step: value if (step, world.rank) == (2, 1) else 1.0,
            refuses_from=2,
        )
        cadence = Cadence(log=1, validation=2, checkpoint=2)
        run(parts_of(log, world=world, engine=engine, cadence=cadence), log)

    for ended, log in zip(on_two_ranks(action), logs, strict=True):
        assert isinstance(ended.error, TrainingError)
        assert ended.error.on_every_rank
        message = str(ended.error)
        assert "Loss is not finite on rank 1 at step 2 (a.npy window 2; a.npy win" in message
        assert "before the optimizer step" in message
        assert "lower optimizer.lr" in message
        assert log[2:] == [
            rate(0, 6),
            "report 1",
            "accumulate 2",
            "accumulate 3",
            "refuse",
            "close",
        ]


def run_refused(cadence: Cadence | None = None, **engine: Any) -> tuple[Log, list[str]]:
    """Train alone with an engine that refuses the third update; the log, and what was raised."""
    log: Log = []
    fake = FakeEngine(log, refuses_from=3, **engine)
    raised = []
    try:
        run(parts_of(log, engine=fake, cadence=cadence), log)
    except TrainingError as error:
        raised.append(str(error))
    return log, raised


def test_a_refused_update_is_found_while_the_next_step_is_computed() -> None:
    log, [message] = run_refused()
    assert "Gradient is not finite on rank 0 at step 3 (a.npy window 4; a.npy window 5)" in message
    assert happened(log, "update", "refuse") == [rate(0, 6), rate(1, 6), "refuse", "refuse"]
    assert log[-1] == "close"


@pytest.mark.parametrize(
    "cadence",
    [
        Cadence(log=3, validation=0, checkpoint=0),
        Cadence(log=0, validation=3, checkpoint=0),
        Cadence(log=0, validation=0, checkpoint=3),
    ],
    ids=["told", "validated", "saved"],
)
def test_a_step_is_known_to_be_good_before_it_is_told_validated_or_saved(cadence: Cadence) -> None:
    log, [message] = run_refused(cadence)
    assert "at step 3 " in message
    assert log[-2:] == ["refuse", "close"]


def test_a_step_is_known_to_be_good_before_the_next_one_waits_for_data() -> None:
    log: Log = []
    engine = FakeEngine(log, refuses_from=2)
    parts = parts_of(log, engine=engine, loader=FakeLoader(log, missing_from=4))
    with pytest.raises(TrainingError, match="not finite on rank 0 at step 2"):
        run(parts, log, stop_when="waits")
    assert not happened(log, "save")


def test_an_overflow_of_fp16_ends_nothing() -> None:
    log, raised = run_refused(scale=65536.0)
    assert not raised
    assert log.count("refuse") == 4
    log, [message] = run_refused(
        scale=65536.0, training_loss=lambda step: math.nan if step == 4 else 1.0
    )
    assert "Loss is not finite on rank 0 at step 4" in message
