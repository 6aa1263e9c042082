"""Gather weights: not again after a save, once for several passes, one by one for histograms."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from refocused.metrics.trackers import Histogram

BINS = 64
_TOGETHER = 2**22  # elements of a histogram, copied at once
_HOLDER = -1  # DeepSpeed numbers the modules that use a weight from 0


@contextlib.contextmanager
def without_regathering(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed's optimizer save without gathering the small weights again afterwards.

    It partitions all weights before a save, and then gathers those below
    `stage3_param_persistence_threshold` again: half of the time that training waits for a
    background save (deepspeed 0.19, gloo). They have not changed, so the full tensors are kept and
    put back. Does nothing at other stages, or with weights on an NVMe drive, whose buffers are
    released by partitioning.
    """
    small = getattr(optimizer, "persistent_parameters", [])
    whole = [
        (weight, weight.data)
        for weight in small
        if weight.ds_status is ZeroParamStatus.AVAILABLE
        and weight.ds_tensor.final_location != OffloadDeviceEnum.nvme
    ]
    if len(whole) < len(small) or not whole:  # not gathered yet at step 0
        yield
        return
    optimizer.checkpoint_event_epilogue = optimizer.invalidate_secondary_tensor
    try:
        yield
    finally:
        del optimizer.checkpoint_event_epilogue
        for weight, data in whole:
            weight.data = data
            weight.ds_status = ZeroParamStatus.AVAILABLE


@contextlib.contextmanager
def gathered_once(module: nn.Module) -> Iterator[None]:
    """Gather the weights once for all forward passes inside; collective.

    DeepSpeed partitions a block's weights after each pass unless another module uses them, so they
    are marked as in use. Does nothing at other stages.
    """
    weights: list[Any] = [weight for weight in module.parameters() if hasattr(weight, "ds_status")]
    apart = [one for one in weights if one.ds_status is not ZeroParamStatus.AVAILABLE]
    with GatheredParameters(apart):
        for weight in weights:
            weight.ds_active_sub_modules.add(_HOLDER)
        try:
            yield
        except BaseException:  # the modules of an interrupted pass are still marked
            for weight in weights:
                weight.ds_active_sub_modules.clear()
            raise
        finally:
            for weight in weights:
                weight.ds_active_sub_modules.discard(_HOLDER)


def histograms_of(module: nn.Module, *, gradient_scale: float) -> list[Histogram]:
    """Describe a model between its last backward pass and the update; collective.

    Gathers one parameter at a time in float32. Gradients, of the whole step and before clipping,
    are divided by `gradient_scale`. Non-finite tensors have no histogram.
    """
    found = []
    for name, parameter in module.named_parameters():
        weights = safe_get_full_fp32_param(parameter)  # None at stage 0
        found.append(histogram_of(f"weights/{name}", parameter if weights is None else weights))
        if (gradient := safe_get_full_grad(parameter)) is not None:
            found.append(histogram_of(f"gradients/{name}", gradient, scale=gradient_scale))
    return [one for one in found if one is not None]


def histogram_of(name: str, values: Tensor, *, scale: float = 1.0) -> Histogram | None:
    """Return the histogram of `values / scale`; None if some are not finite."""
    values = values.detach().float().flatten() / scale
    low, high = (float(one) for one in torch.aminmax(values))
    squares = float(values.square().sum())
    if not all(map(math.isfinite, (low, high, squares))):
        return None
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.zeros(BINS, dtype=torch.long, device=values.device)
    for part in torch.split(values, _TOGETHER):  # `histc` raises in a deterministic run on a GPU
        bins = ((part - low) / (high - low) * BINS).long().clamp_(0, BINS - 1)
        counts += torch.bincount(bins, minlength=BINS)
    return Histogram(name, low, high, counts.tolist(), float(values.sum()), squares)
