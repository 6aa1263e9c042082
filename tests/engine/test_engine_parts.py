"""Single parts of the engine: histograms, full weights kept in a save, DeepSpeed's errors."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from refocused.engine import engine
from refocused.engine.deepspeed_patches import without_regathering
from refocused.engine.engine import BINS, Engine, histogram_of
from refocused.system.errors import TrainingError


def test_it_is_the_histogram_that_numpy_makes():
    values = torch.randn(30, 40, generator=torch.Generator().manual_seed(1))
    found = histogram_of("weights/x", values)
    assert found is not None
    counts, edges = np.histogram(values.numpy(), bins=BINS)
    assert list(found.counts) == counts.tolist()
    assert (found.low, found.high) == pytest.approx((edges[0], edges[-1]))
    assert found.total == pytest.approx(float(values.sum()), rel=1e-4)
    assert found.squares == pytest.approx(float(values.square().sum()))


@pytest.mark.parametrize(
    ("values", "scale", "described"),
    [
        ([-8.0, 4.0], 4.0, (-2.0, 1.0, -1.0, 5.0)),
        ([1.0] * 10, 1.0, (0.5, 1.5, 10.0, 10.0)),  # equal ones are in one bin
    ],
)
def test_a_histogram_has_the_bounds_the_sum_and_the_squares(values, scale, described):
    found = histogram_of("weights/x", torch.tensor(values, dtype=torch.bfloat16), scale=scale)
    assert found is not None
    assert (found.low, found.high, found.total, found.squares) == described
    assert sum(found.counts) == len(values)
    assert max(found.counts) == values.count(values[0])


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e30])
def test_non_finite_tensors_have_none(odd):
    tensor = torch.tensor([1.0, odd, 2.0])  # the square of 1e30 is infinite
    assert histogram_of("weights/x", tensor) is None


def test_no_element_of_a_large_tensor_is_missed(monkeypatch):
    monkeypatch.setattr(engine, "_TOGETHER", 7)
    values = torch.linspace(0, 1, 100)
    found = histogram_of("weights/x", values)
    assert found is not None
    assert list(found.counts) == np.histogram(values.numpy(), bins=BINS)[0].tolist()


WHOLE, APART = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


class Optimizer:
    """The part of DeepSpeed's optimizer that a save uses."""

    def __init__(self, *weights):
        self.persistent_parameters = list(weights)
        self.gathered = 0

    def save(self):
        for weight in self.persistent_parameters:
            weight.data, weight.ds_status = torch.empty(0), APART
        self.checkpoint_event_epilogue()

    def checkpoint_event_epilogue(self):
        self.gathered += 1

    def invalidate_secondary_tensor(self):
        """Do nothing."""


def weight(status=WHOLE, part=None):
    place = SimpleNamespace(final_location=part)
    return SimpleNamespace(data=torch.arange(3.0), ds_status=status, ds_tensor=place)


@pytest.mark.parametrize("fails", [False, True])
def test_full_weights_are_put_back_without_gathering(fails):
    optimizer = Optimizer(weight(), weight(part=OffloadDeviceEnum.cpu))
    with contextlib.suppress(OSError), without_regathering(optimizer):
        optimizer.save()
        if fails:
            raise OSError("full")
    assert optimizer.gathered == 0
    for one in optimizer.persistent_parameters:
        assert (one.ds_status, one.data.tolist()) == (WHOLE, [0.0, 1.0, 2.0])
    optimizer.checkpoint_event_epilogue()
    assert optimizer.gathered == 1  # the next one is DeepSpeed's own


@pytest.mark.parametrize(
    "other", [weight(status=APART), weight(part=OffloadDeviceEnum.nvme)], ids=["apart", "nvme"]
)
def test_deepspeed_gathers_if_a_weight_cannot_be_kept(other):
    optimizer = Optimizer(weight(), other)
    with without_regathering(optimizer):
        optimizer.save()
    assert optimizer.gathered == 1


def engine_that_raises(text):
    def step():
        raise Exception(text)

    fake = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[], loss_scale=1.0),
        step=step,
        _copy_recovery_script=lambda folder: None,
        fp16_enabled=lambda: False,
        zero_optimization_stage=lambda: 3,
        global_steps=0,
    )
    return Engine(fake, device=torch.device("cpu"), rank=0)


def test_an_overflow_at_the_smallest_scale_is_reported_on_every_rank():
    engine = engine_that_raises("Current loss scale already at minimum - cannot decrease it.")
    with pytest.raises(TrainingError, match=r"precision\.dtype=bf16") as raised:
        engine.update(1e-3)
    assert raised.value.on_every_rank


def test_other_errors_of_a_step_are_unchanged():
    with pytest.raises(Exception, match="another thing") as raised:
        engine_that_raises("another thing").update(1e-3)
    assert not isinstance(raised.value, TrainingError)
