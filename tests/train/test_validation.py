"""Losses: validation, the first loss, and the check of a resumed model."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from run_fakes import FakeEngine, FakeStop, Log, batch, parts_of
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.data.loader.batch import Batch
from refocused.system.errors import CheckpointError, TrainingError
from refocused.system.world import World
from refocused.train.step.evaluation import ValidationLoss, validation_loss
from refocused.train.step.loss_check import (
    SavedLoss,
    check_first_loss,
    check_resumed_loss,
    measure_saved_loss,
)
from refocused.train.step.state import read_part
from refocused.train.step.stopping import StopRequest


def by_first_token(inputs: Tensor, labels: Tensor) -> float:
    return float(inputs[0, 0])


def validated(
    batches: list[Batch], *, world: World | None = None, stop_when: str | None = None
) -> tuple[ValidationLoss | None, Log]:
    log: Log = []
    engine = FakeEngine(log, validation=by_first_token)
    parts = parts_of(log, world=world, engine=engine, validation_batches=lambda: iter(batches))
    return validation_loss(parts, cast("StopRequest", FakeStop(log, stop_when))), log


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            [batch(2), batch(4)],
            [batch(8, ignored=2), batch(0, ignored=4)],
            ValidationLoss((4 * 2 + 4 * 4 + 2 * 8) / 10, {}),
        ),
        (
            [batch(2, source="web"), batch(5, source="web"), batch(8, source="code")],
            [  # too few windows of one source for the second rank's last rows
                batch(3, source="web"),
                batch(0, ignored=4, source="web"),
                batch(0, ignored=4, source="code"),
            ],
            ValidationLoss(18 / 4, {"web": 10 / 3, "code": 8.0}),
        ),
    ],
)
def test_losses_by_source_are_means_over_all_ranks(
    first: list[Batch], second: list[Batch], expected: ValidationLoss
) -> None:
    for loss in results(
        on_two_ranks(lambda world: validated([first, second][world.rank], world=world)[0])
    ):
        assert loss == dataclasses.replace(expected, mean=pytest.approx(expected.mean))


def test_without_data_or_when_stopped_there_is_no_loss() -> None:
    assert validated([]) == (None, [])
    assert validated([batch(0)] * 5, stop_when="validate") == (None, ["validate"])


@pytest.mark.parametrize("off", [-0.31, 0.31, math.inf, math.nan])
def test_a_wrong_first_loss_is_rejected(off: float) -> None:
    engine = FakeEngine([], validation=lambda inputs, labels: math.log(512) + off)
    with pytest.raises(TrainingError, match=r"should be 6\.238 within 0\.3"):
        check_first_loss(parts_of([], engine=engine))


def test_the_first_loss_is_the_mean_of_the_ranks() -> None:
    def action(world: World) -> float:
        off = [-0.25, 0.05][world.rank]
        engine = FakeEngine([], validation=lambda inputs, labels: math.log(512) + off)
        return check_first_loss(parts_of([], world=world, engine=engine))

    assert results(on_two_ranks(action)) == [pytest.approx(math.log(512) - 0.1, abs=1e-6)] * 2


SAVED = SavedLoss(windows=((1, 2, 3), (4, 5, 6)), losses=(2.0, 2.4))  # within 0.2


def resumed(loss: float, saved: SavedLoss | None = SAVED, *, allowed: bool = False) -> Log:
    log: Log = []
    engine = FakeEngine([], validation=lambda inputs, labels: loss)
    saver = SimpleNamespace(loaded_loss=saved, loaded_changed=allowed)
    check_resumed_loss(parts_of(log, engine=engine, saver=saver))
    return log


def test_a_resumed_model_is_compared_on_the_windows_of_its_save() -> None:
    assert resumed(2.35) == [
        "resumed_loss:   loss     2.3500 on windows of the saved step, 2.2000 at the save"
    ]
    assert resumed(9.0, None) == []  # a checkpoint of an earlier version
    for loss in (1.9, 2.45, 5.9):
        (said,) = resumed(loss)
        assert said.startswith(f"resumed_loss_warning: The loaded model has a loss of {loss:.3f}")
        assert "it was 2.200, and +-0.200 is usual" in said


@pytest.mark.parametrize("loss", [5.95, 6.3, 30.0, math.nan])
def test_only_a_model_that_is_untrained_again_stops_a_resume(loss: float) -> None:
    with pytest.raises(TrainingError, match=r"untrained model has about 6\.238") as told:
        resumed(loss)
    assert told.value.on_every_rank
    assert resumed(loss, allowed=True)[0].startswith("resumed_loss_warning")
    early = SavedLoss(windows=SAVED.windows, losses=(6.0, 6.1))
    assert "resumed_loss" in resumed(loss, early)[0]  # had learned nothing yet


def test_a_save_measures_windows_of_rank_0_on_every_rank() -> None:
    def action(world: World) -> SavedLoss | None:
        rows = torch.arange(6 * 500).view(6, 500) + 10_000 * world.rank
        engine = FakeEngine([], validation=by_first_token, last_batch=rows)
        return measure_saved_loss(cast("Any", engine), world)

    first, other = results(on_two_ranks(action))
    assert first == other
    assert first is not None
    assert first.windows == tuple(tuple(range(500 * n, 500 * n + 256)) for n in range(4))
    assert first.losses == (0.0, 500.0, 1000.0, 1500.0)
    record = {"saved_loss": first.model_dump(mode="json"), "step": 7}
    assert read_part(record, "saved_loss", SavedLoss) == first and record == {"step": 7}


@pytest.mark.parametrize("rows", [None, torch.full((1, 8), 7)])
def test_a_save_without_a_step_or_a_finite_loss_records_none(rows: Tensor | None) -> None:
    engine = FakeEngine([], validation=lambda inputs, labels: math.nan, last_batch=rows)
    assert measure_saved_loss(cast("Any", engine), World()) is None
    with pytest.raises(CheckpointError, match="malformed part: saved_loss"):
        read_part({"saved_loss": {"windows": [], "losses": "x"}}, "saved_loss", SavedLoss)
