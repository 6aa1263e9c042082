"""Losses: validation and the first loss."""

import dataclasses
import math

import pytest
from run_fakes import FakeEngine, Log, batch, trainer_of
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.data.loader.batch import Batch
from refocused.system.errors import TrainingError
from refocused.system.world import World
from refocused.train.lifecycle.resume import check_first_loss
from refocused.train.step.evaluation import ValidationLoss, validation_loss


def by_first_token(inputs: Tensor, labels: Tensor) -> float:
    return float(inputs[0, 0])


def validated(
    batches: list[Batch], *, world: World | None = None, stop_when: str | None = None
) -> tuple[ValidationLoss | None, Log]:
    log: Log = []
    engine = FakeEngine(log, validation=by_first_token)
    trainer = trainer_of(
        log,
        world=world,
        engine=engine,
        validation_batches=lambda: iter(batches),
        stop_when=stop_when,
    )
    return validation_loss(trainer), log


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
            [  # too few sequences of one source for the second rank's last rows
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
        check_first_loss(trainer_of([], engine=engine))


def test_the_first_loss_is_the_mean_of_the_ranks() -> None:
    def action(world: World) -> float:
        off = [-0.25, 0.05][world.rank]
        engine = FakeEngine([], validation=lambda inputs, labels: math.log(512) + off)
        return check_first_loss(trainer_of([], world=world, engine=engine))

    assert results(on_two_ranks(action)) == [pytest.approx(math.log(512) - 0.1, abs=1e-6)] * 2
