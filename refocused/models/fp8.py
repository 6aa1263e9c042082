"""Compute the blocks' linear layers, forward and backward, in 8-bit floating point."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from refocused.system.errors import ConfigError
from refocused.system.world import World

Scaling = Literal["tensorwise", "rowwise"]
VALUES = torch.float8_e4m3fn  # activations and weights: 3 mantissa bits, up to 448
GRADIENTS = torch.float8_e5m2  # 2 mantissa bits, up to 57,344 and down to 2^-16
SMALLEST_MAXIMUM = 1e-30  # lower bound of a maximum, so that scale and inverse stay finite
LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


def compute_in_fp8(
    model: nn.Module, *, block_class: type[nn.Module], scaling: Scaling, world: World
) -> int:
    """Make the blocks' linear layers compute in 8 bits while training; return their number.

    Parameters keep names and types. Without gradients (validation, samples) the layers compute as
    before, like an exported model. Collective; call it before blocks are compiled. Raises
    ConfigError on every rank if a GPU does not support 8-bit products.
    """
    error = None
    if world.device_kind == "cuda":  # on a CPU slow but correct
        capability = torch.cuda.get_device_capability(world.device)
        if capability < LEAST_CAPABILITY:
            error = ConfigError(
                "precision.fp8 needs a GPU of compute capability 8.9 or more (L4, L40S, H100, "
                f"H200), but {world.device_name} has {'.'.join(map(str, capability))}. Set "
                "precision.fp8=none."
            )
    world.raise_together(error)
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    inside: list[Any] = [layer for block in blocks for layer in block.modules()]
    layers = [layer for layer in inside if type(layer) in _SCALED]
    for layer in layers:
        # In place, so that hooks, names and references stay valid.
        layer.__class__ = _SCALED[type(layer)]
        layer.by_rows = scaling == "rowwise"
    return len(layers)


class _Scaled(nn.Module):
    """A linear layer with 8-bit products while gradients are recorded."""

    weight: Tensor
    bias: Any
    by_rows: bool
    is_transposed: bool  # the weight is `[K, N]`

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., K]` to `[..., N]`."""
        if not torch.is_grad_enabled():
            plain: Tensor = super().forward(x)
            return plain
        mapped: Tensor = ScaledProduct.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), self.weight, self.by_rows, self.is_transposed
        )
        mapped = mapped.view(*x.shape[:-1], -1)
        return mapped if self.bias is None else mapped + self.bias


class ScaledLinear(_Scaled, nn.Linear):
    """`nn.Linear` with 8-bit products."""

    is_transposed = False


class ScaledConv1D(_Scaled, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer with 8-bit products."""

    is_transposed = True


_SCALED: dict[type[nn.Module], Any] = {nn.Linear: ScaledLinear, Conv1D: ScaledConv1D}


class ScaledProduct(torch.autograd.Function):
    """`x W^T` and its two gradients by 8-bit products, with scales of the current values.

    Like a linear layer it saves its input and the parameter itself, which ZeRO-3 may partition and
    gather in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_rows: bool, is_transposed: bool) -> Tensor:
        """Return `x W^T` `[M, N]` of `x` `[M, K]` and a weight `[N, K]` (`[K, N]` if transposed).

        M, K and N are multiples of 16, as GPUs require. With `by_rows` each row of an operand has
        its own scale.
        """
        w = weight.t() if is_transposed else weight
        x_scale, w_scale = scale_of(x, VALUES, by_rows), scale_of(w, VALUES, by_rows)
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.by_rows, ctx.is_transposed = by_rows, is_transposed
        # Fast accumulation only here: gradients are summed further.
        operands = (x, x_scale, VALUES), (w, w_scale, VALUES)
        return scaled_product(*operands, like=x, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of `x` and `weight`, with rowwise scales of the transposes."""
        x, weight, x_scale, w_scale = ctx.saved_tensors
        w = weight.t() if ctx.is_transposed else weight
        g_scale = gt_scale = scale_of(gradient, GRADIENTS, ctx.by_rows)
        if ctx.by_rows:
            x_scale, w_scale = scale_of(x.t(), VALUES, True), scale_of(w.t(), VALUES, True)
            gt_scale = scale_of(gradient.t(), GRADIENTS, True)
        # The gradient comes first: rowwise kernels support e5m2 only there.
        flowing, transposed = (gradient, g_scale, GRADIENTS), (gradient.t(), gt_scale, GRADIENTS)
        of_x = scaled_product(flowing, (w.t(), w_scale, VALUES), like=x)
        of_w = scaled_product(transposed, (x.t(), x_scale, VALUES), like=weight)
        return of_x, of_w.t() if ctx.is_transposed else of_w, None, None


def scale_of(matrix: Tensor, dtype: torch.dtype, by_rows: bool) -> Tensor:
    """Return the scale that maps the largest magnitude to the format's: `[]`, or `[rows, 1]`."""
    largest = matrix.abs().amax(dim=1, keepdim=True) if by_rows else matrix.abs().amax()
    return largest.float().clamp(min=SMALLEST_MAXIMUM) / torch.finfo(dtype).max


def to_fp8(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `matrix / scale`, rounded to the format; non-finite values become NaN."""
    largest = torch.finfo(dtype).max
    # Rounding may exceed the largest number, which e4m3 turns into NaN.
    return (matrix.float() / scale).clamp(-largest, largest).to(dtype)


Operand = tuple[Tensor, Tensor, torch.dtype]  # a matrix, its scale, the format


def scaled_product(
    left: Operand, right: Operand, *, like: Tensor, use_fast_accum: bool = False
) -> Tensor:
    """Return `left right^T` of `[M, K]` and `[N, K]` in 8 bits, in the type of `like`.

    The scales are `[]`, or `[M, 1]` and `[N, 1]`. With `use_fast_accum` a GPU accumulates
    in fewer bits than float32's, which is faster.
    """
    return torch._scaled_mm(
        to_fp8(*left).contiguous(),
        to_fp8(*right).contiguous().t(),  # GPUs only multiply rows by rows
        scale_a=left[1],
        scale_b=right[1].t(),
        out_dtype=like.dtype,
        use_fast_accum=use_fast_accum,
    )
