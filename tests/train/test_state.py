from __future__ import annotations

import dataclasses
import json
import math

import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.data.order.position import Position
from refocused.system.errors import CheckpointError
from refocused.train.step.state import NEWER_FIELDS, TrainState

STATE = TrainState(
    step=12,
    tokens=98_304,
    position=Position(epoch=1, windows=34),
    loss=3.25,
    validation_loss=3.5,
    best_loss=3.4,
    best_step=10,
    seconds=60.5,
    cost_usd=1.25,
    wandb_id="tiny",
)


def test_a_state_survives_the_trip_through_json() -> None:
    assert TrainState.from_record(json.loads(json.dumps(STATE.as_record()))) == STATE
    fresh = TrainState()
    assert TrainState.from_record(json.loads(json.dumps(fresh.as_record()))) == fresh


def test_a_step_of_an_earlier_version_lacks_what_came_later() -> None:
    record = STATE.as_record()
    for name in ("validation_step", "tasks_step"):
        del record[name]
    assert TrainState.from_record(record) == STATE


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_gets_no_number_that_other_parsers_refuse(value: float) -> None:
    state = dataclasses.replace(STATE, loss=value, validation_loss=value)
    record = TrainState.from_record(json.loads(json.dumps(state.as_record(), allow_nan=False)))
    assert record == dataclasses.replace(STATE, loss=None, validation_loss=None)


@pytest.mark.parametrize("name", sorted(set(STATE.as_record()) - NEWER_FIELDS))
def test_a_missing_field_is_named(name: str) -> None:
    record = STATE.as_record()
    del record[name]
    with pytest.raises(CheckpointError, match=f"trainer.json differs .* in: {name}\\. Resume with"):
        TrainState.from_record(record)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(CheckpointError, match="in: momentum"):
        TrainState.from_record(STATE.as_record() | {"momentum": 1})


def test_a_broken_position_is_refused() -> None:
    with pytest.raises(CheckpointError, match="data position"):
        TrainState.from_record(STATE.as_record() | {"position": {"epoch": 0, "windows": -1}})


def test_a_step_moves_the_counters_and_nothing_else() -> None:
    plan = BatchPlan(micro=2, accumulation=3, world_size=4, sequence_length=10)
    after = STATE.after_step(plan, Position(1, 58))
    assert (after.step, after.tokens, after.position) == (13, 98_304 + 240, Position(1, 58))
    assert (after.loss, after.best_loss, after.seconds) == (3.25, 3.4, 60.5)


def test_the_lowest_validation_loss_is_the_best() -> None:
    better = STATE.after_validation(3.3)
    assert (better.validation_loss, better.best_loss, better.best_step) == (3.3, 3.3, 12)
    assert better.validation_step == 12
    worse = STATE.after_validation(3.45)
    assert (worse.validation_loss, worse.best_loss, worse.best_step) == (3.45, 3.4, 10)
    first = TrainState(step=1).after_validation(9.0)
    assert (first.best_loss, first.best_step) == (9.0, 1)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_only_a_finite_loss_can_be_the_best(loss: float) -> None:
    state = TrainState(step=1).after_validation(loss)
    assert state.validation_loss is not None and not math.isfinite(state.validation_loss)
    assert (state.best_loss, state.best_step) == (None, None)
    assert state.after_validation(5.0).best_loss == 5.0
