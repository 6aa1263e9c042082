"""Muon for the blocks' matrices beside AdamW for the rest, also where ZeRO has cut them apart.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a
matrix by an almost orthogonal one of the same singular vectors, for which it needs the matrix
whole. ZeRO hands an optimizer flat pieces: they are gathered, made orthogonal, and cut again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from refocused.config.optimization import OptimizerConfig
from refocused.errors import ConfigError

MOMENTUM = 0.95
ITERATIONS = 5
# Of the quintic iteration; chosen by Muon's author to approach 1 fast, and to end within 0.7-1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The update's root mean square is then that of AdamW's, so that one learning rate serves both (Liu
# et al. 2025, Muon is scalable for LLM training, 2.2).
RMS_OF_ADAMW = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class FlatMatrices:
    """Where the matrices of one flat piece of ZeRO's are.

    Attributes:
        shapes: Of the matrices, in order.
        by_matrix: Whether each matrix is cut into one chunk a rank (stage 3), or all of them
            together (stages 1 and 2).
    """

    shapes: tuple[torch.Size, ...]
    by_matrix: bool

    def update(self, piece: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's piece `[n]` of a function of each whole matrix; every rank must call.

        Args:
            piece: This rank's piece `[n]` of the matrices.
            function: From a matrix in bfloat16, which halves what is gathered, to one of its shape.
        """
        gathered = _gathered(piece.bfloat16())
        result = torch.zeros_like(piece)  # 0 where ZeRO pads
        fill = self._fill_from_chunks if self.by_matrix else self._fill_from_run
        fill(result, gathered, function)
        return result

    def _fill_from_chunks(
        self, result: Tensor, gathered: Tensor, function: Callable[[Tensor], Tensor]
    ) -> None:
        """Put every matrix together from the chunks of all ranks; each computes all of them."""
        ranks, rank, place = len(gathered), _rank(), 0
        for shape in self.shapes:
            chunk = -(-shape.numel() // ranks)
            matrix = gathered[:, place : place + chunk].flatten()[: shape.numel()].view(shape)
            own = function(matrix).flatten()[rank * chunk : (rank + 1) * chunk]
            result[place : place + own.numel()] = own
            place += chunk

    def _fill_from_run(
        self, result: Tensor, gathered: Tensor, function: Callable[[Tensor], Tensor]
    ) -> None:
        """Compute only the matrices that reach into this rank's run of elements."""
        flat, first = gathered.flatten(), _rank() * len(result)
        last, begin = first + len(result), 0
        for shape in self.shapes:
            end = begin + shape.numel()
            low, high = max(begin, first), min(end, last)
            if low < high:
                whole = function(flat[begin:end].view(shape)).flatten()
                result[low - first : high - first] = whole[low - begin : high - begin]
            begin = end


def _gathered(piece: Tensor) -> Tensor:
    """Return the pieces of all ranks `[ranks, n]`."""
    import torch.distributed as dist

    pieces = torch.empty(dist.get_world_size(), len(piece), dtype=piece.dtype, device=piece.device)
    dist.all_gather(list(pieces.unbind()), piece)
    return pieces


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


class MuonAndAdamW(torch.optim.Optimizer):
    """Updates groups with `matrices` by Muon and the others by torch's fused AdamW.

    Attributes:
        layouts: Of each flat parameter of a group with matrices; others are matrices themselves.
    """

    def __init__(self, groups: list[dict[str, Any]], *, optimizer: OptimizerConfig) -> None:
        """Take groups that say `matrices` and `weight_decay`."""
        super().__init__(groups, {"lr": optimizer.lr, "momentum": MOMENTUM})
        self.layouts: dict[Tensor, FlatMatrices] = {}
        # The same groups: it fills in its own settings where they have none.
        self._adamw = torch.optim.AdamW(
            [group for group in self.param_groups if not group["matrices"]],
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )

    _step_supports_amp_scaling = True  # `found_inf` of 1 leaves weights and states as they are
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update."""
        for group in self.param_groups:
            for parameter in group["params"] if group["matrices"] else ():
                if parameter.grad is not None:
                    self._update_matrices(parameter, group)
        self._adamw.param_groups = self._others()  # a load has replaced both
        self._adamw.state = self.state
        if self.found_inf is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["matrices"]]

    def _update_matrices(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a matrix, or a flat piece of some, by Nesterov momentum made orthogonal."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None  # the caller looked
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        made = 1.0 if self.found_inf is None else 1 - self.found_inf
        if self.found_inf is not None:
            gradient = gradient.where(self.found_inf == 0, state["momentum_buffer"])  # no change
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"])
        layout = self.layouts.get(parameter)
        if layout is None:
            update = scaled_orthogonal(ahead)
        else:
            update = layout.update(ahead, scaled_orthogonal)
        parameter.mul_(1 - made * group["lr"] * group["weight_decay"])
        parameter.sub_(update * (made * group["lr"]))


def scaled_orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix `[m, n]` with all singular values near 1, scaled to AdamW's size of update.

    Newton-Schulz iteration in bfloat16, whose errors it forgives.
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = matrix.bfloat16()
    if rows > columns:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    if rows > columns:
        x = x.T
    scaled: Tensor = x.float() * (RMS_OF_ADAMW * math.sqrt(max(rows, columns)))
    return scaled


def block_matrices(model: nn.Module, block_class: type[nn.Module]) -> list[nn.Parameter]:
    """Return the matrices that Muon is for: the weights of linear layers inside blocks.

    Embeddings, positions, heads, norms, biases and whatever else a block holds are not.
    """
    from transformers.pytorch_utils import Conv1D

    blocks = (module for module in model.modules() if isinstance(module, block_class))
    layers = (layer for block in blocks for layer in block.modules())
    linear = (layer for layer in layers if isinstance(layer, nn.Linear | Conv1D))
    weights: list[Any] = [layer.weight for layer in linear if layer.weight.requires_grad]
    return list(dict.fromkeys(weights))


def tell_layouts(zero_optimizer: Any, *, stage: int) -> None:
    """Tell a Muon optimizer inside DeepSpeed's how its flat pieces are made up.

    Raises:
        ConfigError: DeepSpeed was told to deal parameters out in another order.
    """
    muon = getattr(zero_optimizer, "optimizer", zero_optimizer)
    if not isinstance(muon, MuonAndAdamW) or stage == 0:
        return
    if getattr(zero_optimizer, "round_robin_gradients", False):
        raise ConfigError(
            "optimizer.kind=muon needs the order that zero_optimization.round_robin_gradients "
            "changes. Leave that out of zero.fragment."
        )
    for piece, parameters in _pieces(zero_optimizer, stage=stage):
        shapes = tuple(getattr(p, "ds_shape", p.shape) for p in parameters)
        muon.layouts[piece] = FlatMatrices(shapes, by_matrix=stage == 3)


def _pieces(zero_optimizer: Any, *, stage: int) -> Iterable[tuple[Tensor, Sequence[nn.Parameter]]]:
    """Yield DeepSpeed's flat masters on this rank that hold matrices, with the whole parameters."""
    groups = zero_optimizer.optimizer.param_groups
    if stage == 3:
        belongs = zero_optimizer.sub_group_to_group_id
        for number, piece in enumerate(zero_optimizer.fp32_partitioned_groups_flat):
            if groups[belongs[number]]["matrices"]:
                yield piece, zero_optimizer.fp16_groups[number]
        return
    if hasattr(zero_optimizer, "fp32_groups_flat_partition"):  # bf16 at stage 1
        pieces, wholes = zero_optimizer.fp32_groups_flat_partition, zero_optimizer.bf16_groups
    else:
        pieces, wholes = zero_optimizer.single_partition_of_fp32_groups, zero_optimizer.bit16_groups
    for group, piece, parameters in zip(groups, pieces, wholes, strict=True):
        if group["matrices"]:
            yield piece, parameters
