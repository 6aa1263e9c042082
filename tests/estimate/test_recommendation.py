from typing import Any

import pytest

from refocused.config import shipped_files
from refocused.config.model_shape import load_shape
from refocused.estimate.flops import flops_per_token
from refocused.estimate.recommendation import (
    Recommendation,
    choose_model,
    learning_rate,
    recommend,
    save_interval,
)
from refocused.estimate.run_cost import DISK_BYTES_PER_SECOND, START_UP_SECONDS
from refocused.system.errors import ConfigError
from refocused.system.hardware import named_gpu

SHAPES = {
    name: load_shape(shipped_files() / "models" / f"{name}.json")
    for name in ("gpt2_124m", "gpt2_1b")
}


def recommended(tokens: int, **changes: Any) -> Recommendation:
    """Return a run of sequences of 2,048 tokens on eight H100s, at 40 % of their peak."""
    options = {"preset": "gpt2_1b", "epochs": 1.0, "step_tokens": None, "gpus": 8, "mfu": 0.4}
    options |= {"sequence_length": 2048, "per_hour_usd": 20.0, **changes}
    shape = SHAPES[str(options["preset"])]
    return recommend(tokens // 2048, shape=shape, gpu=named_gpu("H100 SXM"), **options)  # type: ignore[arg-type]


def test_the_nearest_model_to_twenty_tokens_a_parameter_is_chosen() -> None:
    assert choose_model(2_500_000_000, SHAPES, sequence_length=None) == "gpt2_124m"
    assert choose_model(15_000_000_000, SHAPES, sequence_length=None) == "gpt2_1b"
    assert recommended(15_000_000_000).ideal_parameters == pytest.approx(750_000_000, rel=1e-6)


def test_a_model_whose_context_is_too_short_is_not_chosen() -> None:
    every = {file.stem: load_shape(file) for file in (shipped_files() / "models").glob("*.json")}
    assert choose_model(10**6, every, sequence_length=None) == "demo_llama"
    assert choose_model(10**6, every, sequence_length=1024) == "llama_121m"
    with pytest.raises(ConfigError, match="--sequence-length 4096: no model"):
        choose_model(10**6, every, sequence_length=4096)


def test_steps_hours_and_dollars_by_hand() -> None:
    found = recommended(10 * 2**30)
    assert found.mfu_fraction == 0.4 < recommended(10 * 2**30, mfu=None).mfu_fraction
    assert (found.steps, found.step_sequences, found.step_tokens) == (10 * 1024, 512, 2**20)
    flops = flops_per_token(SHAPES["gpt2_1b"], sequence_length=2048)
    speed = 8 * 989.4e12 * 0.4 / flops
    seconds = 10 * 2**30 / speed + START_UP_SECONDS
    assert found.save_interval == 500
    seconds += 21 * 256 * 2048 / 3 / speed  # validations each 500 steps, and at the end
    seconds += 21 * 12 * found.parameters / DISK_BYTES_PER_SECOND
    assert found.hours == pytest.approx(seconds / 3600)
    assert found.cost_usd == pytest.approx(20 * seconds / 3600)
    assert found.warmup_steps == 205
    assert found.tokens_per_parameter == pytest.approx(10 * 2**30 / found.parameters)


@pytest.mark.parametrize(
    ("sequences", "options", "step_sequences", "steps"),
    [
        (600_000, {}, 512, 1171),
        (511_999, {}, 256, 1999),
        (20_000, {}, 16, 1250),
        (9_000, {}, 8, 1125),
        (15, {}, 8, 1),
        (600_000, {"step_tokens": 100_000}, 48, 12_500),
        (4_000_000, {"gpus": 3}, 384, 10_416),
        (4_000_000, {"gpus": 3, "step_tokens": 1}, 3, 1_333_333),
    ],
)
def test_a_step_is_smaller_where_the_data_are_few_and_whole_on_every_gpu(
    sequences: int, options: dict[str, Any], step_sequences: int, steps: int
) -> None:
    found = recommended(sequences * 2048, **options)
    assert (found.step_sequences, found.steps) == (step_sequences, steps)
    assert found.warmup_steps < found.steps


def test_the_learning_rate_falls_with_the_size() -> None:
    rates = [learning_rate(size) for size in (1_800_000, 85_000_000, 680_000_000, 10**11)]
    assert rates == [1e-3, 7e-4, 4e-4, 1e-4]


def test_a_chosen_model_gets_the_passes_it_needs() -> None:
    found = recommended(2_000_000_000, epochs=None)
    assert found.epochs == pytest.approx(20 * found.parameters / 2e9, rel=1e-5)
    assert found.tokens_per_parameter == pytest.approx(20, rel=1e-5)
    assert "repeated data" in found.notes[0]
    assert "large for the data" in recommended(10**9).notes[0]


@pytest.mark.parametrize(
    ("steps", "steps_per_hour", "interval"),
    [(100_000, 2500, 1000), (100_000, 900, 200), (300, 2500, 50), (3, 2500, 1), (10**6, 1, 1)],
)
def test_saves_are_round_and_half_an_hour_apart(
    steps: int, steps_per_hour: float, interval: int
) -> None:
    assert save_interval(steps, steps_per_hour=steps_per_hour) == interval
