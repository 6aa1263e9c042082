"""How far results and gradients of one form are from those of another; also for benchmarks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def errors_of(
    form: Callable[..., Any], exact_form: Callable[..., Any], inputs: Sequence[Tensor]
) -> list[float]:
    """Return the relative errors of a form's outputs and gradients from an exact form's."""
    results = results_of(form, inputs)
    exact = results_of(exact_form, [tensor.double() for tensor in inputs])
    pairs = zip(results, exact, strict=True)
    return [float((one.double() - right).norm() / right.norm()) for one, right in pairs]


def results_of(form: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a form's outputs, and its inputs' gradients from the same random gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    results = form(*leaves)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    gradients = [_drawn(output.shape, output.dtype, output.device) for output in outputs]
    return [
        *(output.detach() for output in outputs),
        *torch.autograd.grad(outputs, leaves, gradients),
    ]


@functools.lru_cache(maxsize=4)
def _drawn(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the same random numbers, those of bf16, in each type; 1 for a loss."""
    if not shape:
        return torch.ones(shape, dtype=dtype, device=device)
    draw = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=draw).bfloat16().to(device, dtype)
