from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from refocused.metrics.step_metrics import StepMetrics, duration, perplexity

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
CPU = dataclasses.replace(
    FULL,
    step=10,
    total_steps=40,
    learning_rate=3e-10,
    gradient_norm=None,
    step_seconds=0.06,
    tokens_per_second=4266.7,
    mfu_fraction=None,
    data_wait_fraction=0.25,
    gpu_memory_fraction=None,
    seconds_left=1.8,
    cost_usd=None,
    cost_left_usd=None,
    loss_mean=3.21456,  # one step alone
    best_loss=None,
)


HEAD = "step      10/40 25.0% | loss 3.2146 | lr 3.00e-10"


@pytest.mark.parametrize(
    ("metrics", "changes", "line"),
    [
        (
            FULL,
            {},
            "step   1,200/100,000 1.2% | loss 3.2146 mean 3.2301 best val 3.1021 | lr 2.99e-4 | "
            "gnorm 0.46 | 1.83 s 571,467 tok/s | MFU 41.2% | spent $14.60, left 50.4 h $1,208.60",
        ),
        (  # waits and memory are shown where they ask for attention
            FULL,
            {"data_wait_fraction": 0.123, "gpu_memory_fraction": 0.95, "best_loss": None},
            "step   1,200/100,000 1.2% | loss 3.2146 mean 3.2301 | lr 2.99e-4 | gnorm 0.46 | "
            "1.83 s 571,467 tok/s | MFU 41.2% | data 12.3% | mem 95% | spent $14.60, "
            "left 50.4 h $1,208.60",
        ),
        # What is unknown is left out.
        (CPU, {}, f"{HEAD} | 0.06 s 4,267 tok/s | data 25.0% | left 2 s"),
        (CPU, {"step_seconds": None, "seconds_left": None}, f"{HEAD} | data 25.0%"),
        (
            CPU,
            {"loss_scale": 32_768.0, "skipped_steps": 2, "mfu_refused": True},
            f"{HEAD} | scale 32768 (2 skipped) | 0.06 s 4,267 tok/s | MFU ? | data 25.0% | "
            "left 2 s",
        ),
    ],
)
def test_the_line_of_a_step(metrics: StepMetrics, changes: dict[str, Any], line: str) -> None:
    assert dataclasses.replace(metrics, **changes).as_line() == line
    assert len(line) < 200


def test_a_record_holds_every_field_under_its_name() -> None:
    assert StepMetrics(**FULL.as_record()) == FULL  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.041, "0.04 s"),
        (0.996, "1 s"),
        (48.2, "48 s"),
        (99.4, "99 s"),
        (100.0, "1.7 min"),
        (750.0, "12.5 min"),
        (5999.0, "100.0 min"),
        (6000.0, "1.7 h"),
        (84_960.0, "23.6 h"),
    ],
)
def test_a_time_span_is_written_as_it_is_said(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(2.5) == pytest.approx(12.182494)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))
