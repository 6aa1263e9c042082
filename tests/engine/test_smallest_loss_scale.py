"""What a person is told when fp16 cannot go on."""

from __future__ import annotations

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
    )
    return Engine(fake, device=torch.device("cpu"), rank=0)


def test_an_overflow_at_the_smallest_scale_is_named_on_every_rank() -> None:
    engine = engine_that_raises("Current loss scale already at minimum - cannot decrease it.")
    with pytest.raises(TrainingError, match=r"precision\.dtype=bf16") as raised:
        engine.update(1e-3)
    assert raised.value.on_every_rank


def test_other_failures_of_the_step_stay_what_they_are() -> None:
    with pytest.raises(Exception, match="another thing") as raised:
        engine_that_raises("another thing").update(1e-3)
    assert not isinstance(raised.value, TrainingError)
