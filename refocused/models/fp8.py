"""Linear layers of the blocks whose three matrix products are made in 8 bits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from refocused.system.errors import ConfigError
from refocused.system.world import World

Scaling = Literal["tensorwise", "rowwise"]
VALUES = torch.float8_e4m3fn  # activations and weights: 3 bits of mantissa, up to 448
GRADIENTS = torch.float8_e5m2  # what flows back: 2 bits, but up to 57,344 and down to 2^-16
# Smaller maxima are scaled as if they were this, so that scale and its inverse stay finite.
SMALLEST_MAXIMUM = 1e-30
LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


def compute_in_fp8(
    model: nn.Module, *, block_class: type[nn.Module], scaling: Scaling, world: World
) -> int:
    """Let the blocks' linear layers compute in 8 bits while gradients are taken; all ranks call.

    Parameters stay what they are: names, types, masters. Without gradients (validation, samples)
    the layers compute as before, as an exported model will. Call it before blocks are compiled.

    Returns:
        The number of layers.

    Raises:
        ConfigError: On every rank: a GPU has no products of 8 bits.
    """
    world.raise_together(_missing_hardware(world))
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    inside: list[Any] = [layer for block in blocks for layer in block.modules()]
    layers = [layer for layer in inside if type(layer) in _SCALED]
    for layer in layers:
        # In place, so that hooks, names and whoever holds the layer keep it.
        layer.__class__ = _SCALED[type(layer)]
        layer.by_rows = scaling == "rowwise"
    return len(layers)


def _missing_hardware(world: World) -> ConfigError | None:
    if world.device_kind != "cuda":
        return None  # a CPU multiplies in 8 bits slowly, but right
    capability = torch.cuda.get_device_capability(world.device)
    if capability >= LEAST_CAPABILITY:
        return None
    found = ".".join(map(str, capability))
    return ConfigError(
        f"precision.fp8 needs a GPU of compute capability 8.9 or more (L4, L40S, H100, H200); "
        f"{world.device_name} has {found}. Set precision.fp8=none."
    )


class ScaledLinear(nn.Linear):
    """`nn.Linear` by products of 8 bits."""

    by_rows: bool

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., K]` to `[..., N]`."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        return _biased(input, self.weight, self.bias, by_rows=self.by_rows, is_turned=False)


class ScaledConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is `[K, N]`, by products of 8 bits."""

    by_rows: bool

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., K]` to `[..., N]`."""
        if not torch.is_grad_enabled():
            found: Tensor = super().forward(x)
            return found
        return _biased(x, self.weight, self.bias, by_rows=self.by_rows, is_turned=True)


_SCALED: dict[type[nn.Module], Any] = {nn.Linear: ScaledLinear, Conv1D: ScaledConv1D}


def _biased(
    states: Tensor, weight: Tensor, bias: Tensor | None, *, by_rows: bool, is_turned: bool
) -> Tensor:
    rows = states.reshape(-1, states.shape[-1])
    mapped: Tensor = ScaledProduct.apply(  # type: ignore[no-untyped-call]
        rows, weight, by_rows, is_turned
    )
    mapped = mapped.view(*states.shape[:-1], -1)
    return mapped if bias is None else mapped + bias


class ScaledProduct(torch.autograd.Function):
    """`x W^T` and its two gradients, each product in 8 bits, scaled by what is multiplied now.

    What is kept for the backward pass is what a linear layer keeps: its input and the parameter
    itself, whose values ZeRO-3 may take away and bring back in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_rows: bool, is_turned: bool) -> Tensor:
        """Return `x W^T` `[M, N]` of `x` `[M, K]` and a weight `[N, K]` (`[K, N]` if turned).

        M, K and N are multiples of 16, as GPUs demand. With `by_rows` each row of an operand has a
        scale, otherwise the whole has one.
        """
        w = weight.t() if is_turned else weight
        x_scale, w_scale = scale_of(x, VALUES, by_rows), scale_of(w, VALUES, by_rows)
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.by_rows, ctx.is_turned = by_rows, is_turned
        # The sums of a forward pass may be short; gradients, which are summed on, get long ones.
        return scaled_product(
            in_8_bits(x, x_scale, VALUES),
            x_scale,
            in_8_bits(w, w_scale, VALUES),
            w_scale,
            like=x,
            short_sums=True,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of `x` and `weight`.

        Rows of these products are columns of the ones before: rowwise scales are made anew.
        """
        x, weight, x_scale, w_scale = ctx.saved_tensors
        w = weight.t() if ctx.is_turned else weight
        g_scale = gt_scale = scale_of(gradient, GRADIENTS, ctx.by_rows)
        if ctx.by_rows:
            x_scale, w_scale = scale_of(x.t(), VALUES, True), scale_of(w.t(), VALUES, True)
            gt_scale = scale_of(gradient.t(), GRADIENTS, True)
        of_x = scaled_product(
            in_8_bits(gradient, g_scale, GRADIENTS),
            g_scale,
            in_8_bits(w.t(), w_scale, VALUES),
            w_scale,
            like=x,
        )
        # The gradient comes first: rowwise kernels take e5m2 there alone.
        of_w = scaled_product(
            in_8_bits(gradient.t(), gt_scale, GRADIENTS),
            gt_scale,
            in_8_bits(x.t(), x_scale, VALUES),
            x_scale,
            like=weight,
        )
        return of_x, of_w.t() if ctx.is_turned else of_w, None, None


def scale_of(matrix: Tensor, form: torch.dtype, by_rows: bool) -> Tensor:
    """Return what 8 bits are to be multiplied by to be the matrix: `[]`, or `[rows, 1]`.

    The largest value becomes the largest number of the form, as it is now: no history is kept.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True) if by_rows else matrix.abs().amax()
    return largest.float().clamp(min=SMALLEST_MAXIMUM) / torch.finfo(form).max


def in_8_bits(matrix: Tensor, scale: Tensor, form: torch.dtype) -> Tensor:
    """Return a matrix over its scale, rounded; what is not finite becomes NaN."""
    largest = torch.finfo(form).max
    # Rounding may lead beyond the largest number, which e4m3 turns into NaN.
    return (matrix.float() / scale).clamp(-largest, largest).to(form)


def scaled_product(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    *,
    like: Tensor,
    short_sums: bool = False,
) -> Tensor:
    """Return `left right^T` of `[M, K]` and `[N, K]` in 8 bits, in the type of `like`.

    The scales are `[]`, or `[M, 1]` and `[N, 1]`. With `short_sums` a GPU keeps its sums in fewer
    bits than float32's, which is faster.
    """
    return torch._scaled_mm(
        left.contiguous(),
        right.contiguous().t(),  # GPUs multiply rows by rows alone
        scale_a=left_scale,
        scale_b=right_scale.t(),
        out_dtype=like.dtype,
        use_fast_accum=short_sums,
    )
