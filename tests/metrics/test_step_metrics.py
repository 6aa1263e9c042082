from __future__ import annotations

import dataclasses
import math

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


def test_the_line_of_a_step_on_gpus() -> None:
    assert FULL.as_line() == (
        "step   1,200/100,000 1.2% | loss 3.2146 mean 3.2301 best val 3.1021 | lr 2.99e-4 | "
        "gnorm 0.46 | 1.83 s 571,467 tok/s | MFU 41.2% | spent $14.60, left 50.4 h $1,208.60"
    )


def test_the_line_shows_waits_and_memory_that_ask_for_attention_and_stays_within_200() -> None:
    assert len(FULL.as_line()) < 170
    full = dataclasses.replace(
        FULL, step=99_990, data_wait_fraction=0.123, gpu_memory_fraction=0.95, cost_usd=1214.6
    )
    assert "| MFU 41.2% | data 12.3% | mem 95% | spent $1,214.60, left" in full.as_line()
    assert len(full.as_line()) < 200


def test_what_is_unknown_is_left_out() -> None:
    assert CPU.as_line() == (
        "step      10/40 25.0% | loss 3.2146 | lr 3.00e-10 | 0.06 s 4,267 tok/s | "
        "data 25.0% | left 2 s"
    )


def test_fp16_shows_its_scale_and_what_it_skipped() -> None:
    line = dataclasses.replace(CPU, loss_scale=32_768.0, skipped_steps=2).as_line()
    assert "| scale 32768 (2 skipped) |" in line


def test_before_the_first_speed_there_is_none() -> None:
    line = dataclasses.replace(CPU, step_seconds=None, tokens_per_second=None, seconds_left=None)
    assert line.as_line() == "step      10/40 25.0% | loss 3.2146 | lr 3.00e-10 | data 25.0%"


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
