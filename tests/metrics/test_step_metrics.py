import dataclasses
import math
from typing import Any

import pytest

from refocused.metrics.history import StepMetrics, perplexity
from refocused.system.number_text import duration

FULL = StepMetrics(
    step=1200,
    total_steps=100_000,
    tokens=1_258_291_200,
    epoch=0,
    loss=3.21456,
    loss_mean=3.2301,
    best_loss=3.1021,
    learning_rate=2.99e-4,
    gradient_norm=0.457,
    loss_scale=None,
    skipped_steps=0,
    step_seconds=1.8349,
    tokens_per_second=571_466.7,
    mfu_fraction=0.4123,
    data_wait_fraction=0.0004,
    gpu_memory_fraction=0.8765,
    seconds_left=181_290.0,
    seconds_trained=2200.0,
    cost_usd=14.6,
    cost_left_usd=1208.6,
)
UNKNOWN = ("best_loss", "gradient_norm", "mfu_fraction", "gpu_memory_fraction", "step_seconds")
MONEY = ("cost_usd", "seconds_left", "cost_left_usd")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "loss 3.2146 mean 3.2301 best val 3.1021 | lr 2.99e-4 | gnorm 0.46 | "
            "1.83 s 571,467 tok/s | MFU 41.2% | spent $14.60, left 50.4 h $1,208.60",
        ),
        (  # what is unknown is left out, as is the mean of one step
            {**dict.fromkeys([*UNKNOWN, *MONEY]), "loss_mean": 3.21456, "learning_rate": 3e-10},
            "loss 3.2146 | lr 3.00e-10",
        ),
        (  # waits and memory are shown where they need attention
            {"data_wait_fraction": 0.123, "gpu_memory_fraction": 0.95, "cost_left_usd": None},
            "loss 3.2146 mean 3.2301 best val 3.1021 | lr 2.99e-4 | gnorm 0.46 | "
            "1.83 s 571,467 tok/s | MFU 41.2% | data 12.3% | mem 95% | spent $14.60, left 50.4 h",
        ),
        (
            {**dict.fromkeys([*UNKNOWN, *MONEY]), "loss_scale": 32_768.0, "skipped_steps": 2}
            | {"mfu_refused": True, "seconds_left": 1.8},
            "loss 3.2146 mean 3.2301 | lr 2.99e-4 "
            "| scale 32768 (2 skipped; their steps and tokens count) | MFU ? | left 2 s",
        ),
    ],
)
def test_the_line_of_a_step(changes: dict[str, Any], line: str) -> None:
    metrics = dataclasses.replace(FULL, **changes)
    assert metrics.as_line() == f"step   1,200/100,000 1.2% | {line}"
    assert StepMetrics(**metrics.as_record()) == metrics  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.041, "0.04 s"),
        (0.996, "1 s"),
        (99.4, "99 s"),
        (100.0, "1.7 min"),
        (5999.0, "100.0 min"),
        (6000.0, "1.7 h"),
    ],
)
def test_a_time_span_is_written_as_it_is_said(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_perplexity() -> None:
    assert (perplexity(0.0), perplexity(1e6)) == (1.0, math.inf)
    assert perplexity(2.5) == pytest.approx(12.182494)
    assert math.isnan(perplexity(math.nan))
