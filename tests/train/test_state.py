"""The training state that a checkpoint keeps."""

import dataclasses
import json
import math
from typing import Any

import pytest

from refocused.data.order.sequences import Position
from refocused.system.errors import CheckpointError
from refocused.train.step.state import TrainState

STATE = TrainState(
    step=12,
    tokens=98_304,
    position=Position(epoch=1, sequences=34),
    loss=3.25,
    validation_loss=3.5,
    validation_set="",
    best_loss=3.4,
    best_step=10,
    seconds=60.5,
    cost_usd=1.25,
    wandb_id="tiny",
)


def through_json(state: TrainState) -> TrainState:
    return TrainState.from_record(json.loads(json.dumps(state.as_record(), allow_nan=False)))


def test_a_state_round_trips_through_json() -> None:
    assert through_json(STATE) == STATE
    assert through_json(TrainState()) == TrainState()
    for value in (math.nan, math.inf):  # which other parsers refuse
        odd = dataclasses.replace(STATE, loss=value, validation_loss=value)
        assert through_json(odd) == dataclasses.replace(STATE, loss=None, validation_loss=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best_loss": ...}, r"trainer.json differs .* in: best_loss\. Resume with"),
        ({"step": ..., "cost_usd": ...}, "in: cost_usd, step"),
        ({"momentum": 1}, "in: momentum"),
        ({"position": {"epoch": 0, "sequences": -1}}, "data position"),
        ({"position": 3}, "values of another kind"),
        ({"step": "many"}, "values of another kind"),
    ],
)
def test_a_record_of_another_form_is_rejected(changes: dict[str, Any], said: str) -> None:
    changed = (STATE.as_record() | changes).items()
    record = {name: value for name, value in changed if value is not ...}
    with pytest.raises(CheckpointError, match=said):
        TrainState.from_record(record)


def test_losses_of_other_validation_sets_are_not_compared() -> None:
    """Regression: `best` stayed the easy set's to the end of the run."""
    easy = TrainState(step=10).after_validation(1.0, of="easy")
    assert (easy.after_validation(0.5, of="easy").best_loss, easy.validation_set) == (0.5, "easy")
    hard = dataclasses.replace(easy, step=20).after_validation(3.0, of="hard")
    assert (hard.best_loss, hard.best_step, hard.validation_set) == (3.0, 20, "hard")
    nothing = easy.after_validation(math.nan, of="hard")
    assert (nothing.best_loss, nothing.best_step) == (None, None)


@pytest.mark.parametrize(
    ("before", "loss", "best"),
    [
        (STATE, 3.3, (3.3, 12)),
        (STATE, 3.45, (3.4, 10)),
        (TrainState(step=1), 9.0, (9.0, 1)),
        (TrainState(step=1), math.nan, (None, None)),
        (TrainState(step=1), math.inf, (None, None)),
        (TrainState(step=1).after_validation(math.nan), 5.0, (5.0, 1)),
    ],
)
def test_only_a_finite_loss_can_be_the_best(
    before: TrainState, loss: float, best: tuple[float | None, int | None]
) -> None:
    after = before.after_validation(loss)
    assert str(after.validation_loss) == str(loss)
    assert after.validation_step == before.step
    assert (after.best_loss, after.best_step) == best
