from __future__ import annotations

import pytest

from refocused.commands.recommendation import Recommendation, recommend, save_interval
from refocused.config.files import REPOSITORY_CONFIG
from refocused.config.shape import load_shape
from refocused.errors import ConfigError
from refocused.estimate.run_cost import DISK_BYTES_PER_SECOND, START_UP_SECONDS, Machine
from refocused.estimate.work import flops_per_token

SHAPES = {
    name: load_shape(REPOSITORY_CONFIG / "models" / f"{name}.json")
    for name in ("gpt2_124m", "gpt2_1b")
}
MACHINE = Machine(gpus=8, peak_flops=989.4e12, mfu_fraction=0.4, per_hour_usd=20.0)


def recommended(
    tokens: int,
    *,
    preset: str | None = None,
    epochs: float | None = None,
    machine: Machine = MACHINE,
) -> Recommendation:
    return recommend(
        tokens,
        shapes=SHAPES,
        preset=preset,
        epochs=epochs,
        step_tokens=2**20,
        sequence_length=2048,
        machine=machine,
    )


def test_the_nearest_model_to_twenty_tokens_a_parameter_is_chosen() -> None:
    assert recommended(2_500_000_000).preset == "gpt2_124m"
    assert recommended(15_000_000_000).preset == "gpt2_1b"
    assert recommended(15_000_000_000).ideal_parameters == 750_000_000


def test_steps_hours_and_dollars_by_hand() -> None:
    found = recommended(10 * 2**30, preset="gpt2_1b", epochs=1.0)
    assert found.steps == 10 * 1024
    flops = flops_per_token(SHAPES["gpt2_1b"], sequence_length=2048)
    speed = 8 * 989.4e12 * 0.4 / flops
    seconds = 10 * 2**30 / speed + START_UP_SECONDS
    seconds += 11 * 256 * 2048 / 3 / speed  # validations each 1,000 steps, and at the end
    assert found.save_interval == 500
    seconds += 21 * 12 * found.parameters / DISK_BYTES_PER_SECOND
    assert found.hours == pytest.approx(seconds / 3600)
    assert found.cost_usd == pytest.approx(20 * seconds / 3600)
    assert found.warmup_steps == 205
    assert found.tokens_per_parameter == pytest.approx(10 * 2**30 / found.parameters)


def test_a_chosen_model_gets_the_passes_it_needs() -> None:
    found = recommended(2_000_000_000, preset="gpt2_1b")
    assert found.epochs == pytest.approx(20 * found.parameters / 2e9)
    assert found.tokens_per_parameter == pytest.approx(20)
    assert "repeated data" in found.notes[0]
    assert "large for the data" in recommended(10**9, preset="gpt2_1b", epochs=1).notes[0]


def test_an_unknown_price_is_no_price() -> None:
    machine = Machine(gpus=8, peak_flops=989.4e12, mfu_fraction=0.4, per_hour_usd=None)
    assert recommended(10**10, machine=machine).cost_usd is None


def test_less_than_a_step_and_impossible_speeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="less than one step"):
        recommended(1000, preset="gpt2_124m", epochs=1)
    with pytest.raises(ConfigError, match="utilisation"):
        recommended(10**10, machine=Machine(8, 989.4e12, 0.9, None))


@pytest.mark.parametrize(
    ("steps", "steps_per_hour", "interval"),
    [(100_000, 2500, 1000), (100_000, 900, 200), (300, 2500, 50), (3, 2500, 1), (10**6, 1, 1)],
)
def test_saves_are_round_and_half_an_hour_apart(
    steps: int, steps_per_hour: float, interval: int
) -> None:
    assert save_interval(steps, steps_per_hour=steps_per_hour) == interval
