"""The error if fp16 overflows at the smallest loss scale."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refocused.engine.engine import Engine
from refocused.system.errors import TrainingError


def engine_that_raises(text: str) -> Engine:
    def step() -> None:
        raise Exception(text)

    fake: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{}], loss_scale=1.0),
        step=step,
        _copy_recovery_script=lambda folder: None,
        fp16_enabled=lambda: False,
        zero_optimization_stage=lambda: 3,
        global_steps=0,
    )
    return Engine(fake, device=torch.device("cpu"), rank=0)


def test_an_overflow_at_the_smallest_scale_is_reported_on_every_rank() -> None:
    engine = engine_that_raises("Current loss scale already at minimum - cannot decrease it.")
    with pytest.raises(TrainingError, match=r"precision\.dtype=bf16") as raised:
        engine.update(1e-3)
    assert raised.value.on_every_rank


def test_other_errors_of_a_step_are_unchanged() -> None:
    with pytest.raises(Exception, match="another thing") as raised:
        engine_that_raises("another thing").update(1e-3)
    assert not isinstance(raised.value, TrainingError)
