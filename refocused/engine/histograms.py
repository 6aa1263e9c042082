"""Histograms of weights and gradients, per parameter, over all ranks."""

import dataclasses
import math

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor

BINS = 64
_EXACT = 2**22  # torch counts in float32, which is exact up to 2**24


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterHistogram:
    """The distribution of one tensor's elements, in `BINS` bins of equal width."""

    low: float  # lower edge: the smallest element, unless all are equal
    high: float  # upper edge: the largest element, unless all are equal
    counts: tuple[int, ...]
    total: float  # sum of the elements
    squares: float  # sum of their squares


@dataclasses.dataclass(frozen=True, slots=True)
class Histograms:
    """The histograms of one step by parameter name; non-finite tensors have none."""

    weights: dict[str, ParameterHistogram]  # before the step's update
    gradients: dict[str, ParameterHistogram]  # of the whole step, before clipping


def histograms_of(module: torch.nn.Module, *, gradient_scale: float) -> Histograms:
    """Describe a model between its last backward pass and the update; collective.

    Gathers one parameter at a time in float32. Gradients are divided by `gradient_scale`.
    """
    histograms = Histograms({}, {})
    for name, parameter in module.named_parameters():
        weights = safe_get_full_fp32_param(parameter)  # None at stage 0
        if found := histogram_of(parameter if weights is None else weights):
            histograms.weights[name] = found
    for name, parameter in module.named_parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None and (found := histogram_of(gradient, scale=gradient_scale)):
            histograms.gradients[name] = found
    return histograms


def histogram_of(values: Tensor, *, scale: float = 1.0) -> ParameterHistogram | None:
    """Return the histogram of `values / scale`; None if some are not finite."""
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
