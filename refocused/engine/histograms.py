"""Histograms of the weights and of the gradient, parameter by parameter, over all ranks."""

from __future__ import annotations

import dataclasses
import math

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor

BINS = 64
_EXACT = 2**22  # elements that float32, in which torch counts, still counts one by one


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterHistogram:
    """How the elements of one tensor are distributed."""

    low: float  # where the first bin begins: the smallest element, if not all are equal
    high: float  # where the last bin ends: the largest element, if not all are equal
    counts: tuple[int, ...]  # elements in each of the bins, which are equally wide
    total: float  # sum of the elements
    squares: float  # sum of their squares


@dataclasses.dataclass(frozen=True, slots=True)
class Histograms:
    """Those of one step, by the parameters' names; what is not finite has none."""

    weights: dict[str, ParameterHistogram]  # before the step's update
    gradients: dict[str, ParameterHistogram]  # of the whole step, before clipping


def histograms_of(module: torch.nn.Module, *, gradient_scale: float) -> Histograms:
    """Describe a model between its last backward pass and the update; every rank must call.

    One parameter after the other is gathered from the ranks in float32, so that the largest one
    takes that much memory for a moment. The gradients are divided by `gradient_scale`.
    """
    histograms = Histograms({}, {})
    for name, parameter in module.named_parameters():
        # As exact as there is one: at stage 0 it is the parameter itself.
        weights = safe_get_full_fp32_param(parameter)
        if found := histogram_of(parameter if weights is None else weights):
            histograms.weights[name] = found
    for name, parameter in module.named_parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None and (found := histogram_of(gradient, scale=gradient_scale)):
            histograms.gradients[name] = found
    return histograms


def histogram_of(values: Tensor, *, scale: float = 1.0) -> ParameterHistogram | None:
    """Count elements by value after dividing them by `scale`; None: some are not finite."""
    values = values.detach().float().flatten() / scale
    low, high = (float(one) for one in torch.aminmax(values))
    squares = float(values.square().sum())
    if not all(map(math.isfinite, (low, high, squares))):
        return None
    if low == high:
        low, high = low - 0.5, high + 0.5
    parts = [
        torch.histc(part, bins=BINS, min=low, max=high) for part in torch.split(values, _EXACT)
    ]
    counts = torch.stack(parts).long().sum(dim=0)
    return ParameterHistogram(low, high, tuple(counts.tolist()), float(values.sum()), squares)
