"""Muon for the blocks' matrices and AdamW for the rest, under any ZeRO stage.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) orthogonalizes the momentum of
a matrix, which needs the whole matrix. ZeRO gives an optimizer flat pieces: each matrix is gathered
on one rank, orthogonalized there, and scattered again.

An update is `lr * 0.2 * sqrt(max(m, n))` times the orthogonal matrix, whichever way a layer stores
its weight: the `match_rms_adamw` of `torch.optim.Muon`. The `original` form (Jordan's) has
`lr * sqrt(max(1, outputs / inputs))`. Both agree, for a layer of any shape, at
`matrix_lr = lr_original / (0.2 * sqrt(inputs))`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from refocused.config.optimization import RMS_OF_ADAMW, OptimizerConfig
from refocused.engine.zero_layout import OUTPUT_MOMENTS, flat_groups
from refocused.system.errors import ConfigError
from refocused.system.hardware import BF16_FLAGS, cpu_flags

MOMENTUM = 0.95
MOMENT_DECAY = 0.95  # of the outputs' second moments (Li et al. 2025, NorMuon)
ITERATIONS = 5
# Of the quintic iteration (Jordan et al.): fast, with singular values within 0.7-1.2 at the end.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """NorMuon's running mean squares of each output's part of the orthogonal updates."""

    values: Tensor  # of each output of each matrix, float32
    output_axis: int  # of the matrices: 0, or 1 as Conv1D stores them
    share: float | Tensor  # of the new squares; 0: the update is skipped

    def of(self, matrix: int, shapes: Sequence[torch.Size]) -> Tensor:
        """Return the moments of one of several matrices, a view."""
        outputs = [shape[self.output_axis] for shape in shapes]
        return self.values.narrow(0, sum(outputs[:matrix]), outputs[matrix])

    def equalize(self, update: Tensor, moments: Tensor) -> Tensor:
        """Return an orthogonal matrix with outputs of one size, and update their moments.

        It has the norm of an exactly orthogonal one (Li et al. 2025, NorMuon, algorithm 1).
        """
        inputs = 1 - self.output_axis
        moments.lerp_(update.float().square().mean(inputs), self.share)
        scaled: Tensor = update / (moments.sqrt() + 1e-8).unsqueeze(inputs)
        scaled *= math.sqrt(min(update.shape)) / scaled.norm().clamp(min=1e-7)
        return scaled.to(update.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatMatrices:
    """The matrices in one of ZeRO's flat pieces, and the rank that computes each of them."""

    shapes: tuple[torch.Size, ...]
    parts: tuple[tuple[slice, ...], ...]  # `[matrix][rank]`, the slice of that rank's piece
    owners: tuple[int, ...]  # the rank that orthogonalizes each matrix

    def update(
        self,
        ahead: Callable[[slice], Tensor],
        apply: Callable[[slice, Tensor], None],
        moments: Moments | None = None,
    ) -> None:
        """Apply `scaled_orthogonal` of each matrix to this rank's piece; collective.

        In each round every owner computes one matrix, of about the same work, and the ranks hold
        only these. Parts are sent to the owners and back in bfloat16, the type of the iteration, so
        the result is bit for bit that of whole matrices. The owners update the moments, which are
        equal on all ranks.

        Args:
            ahead: Returns what is made orthogonal, in a slice of the piece; called once for each.
            apply: Takes a slice and its update in float32, which it may change.
            moments: NorMuon's.
        """
        import torch.distributed as dist

        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        heaviest = sorted(range(len(self.shapes)), key=lambda one: -_work(self.shapes[one]))
        owned = [[m for m in heaviest if self.owners[m] == owner] for owner in ranks]
        for matrices in itertools.zip_longest(*owned):
            held = [slice(0) if m is None else self.parts[m][rank] for m in matrices]
            mine = matrices[rank]
            leaving = list(map(_size, held))
            coming = [0 if mine is None else _size(self.parts[mine][other]) for other in ranks]
            sent = torch.cat([ahead(part).bfloat16() for part in held])
            received = sent.new_empty(sum(coming))
            dist.all_to_all_single(received, sent, coming, leaving)
            if mine is not None:
                update = orthogonal(received.view(self.shapes[mine]))
                if moments is not None:
                    update = moments.equalize(update, moments.of(mine, self.shapes))
                received.copy_(update.flatten())
            dist.all_to_all_single(sent, received, leaving, coming)
            for matrix, part, new in zip(matrices, held, torch.split(sent, leaving), strict=True):
                if matrix is not None:
                    apply(part, new.float().mul_(size_of_update(self.shapes[matrix])))
        if moments is not None:
            for matrix in set(heaviest) - set(owned[rank]):
                moments.of(matrix, self.shapes).zero_()
            dist.all_reduce(moments.values)  # exact: all but one of each are 0


def flat_matrices(
    shapes: Sequence[torch.Size], *, ranks: int, elements: int, by_matrix: bool
) -> FlatMatrices:
    """Find each rank's part of the matrices, and assign them to owners by their work.

    Stage 3 splits each matrix into one chunk per rank (`by_matrix`); stages 1 and 2 split their
    concatenation into equal runs of `elements`, the size of a rank's piece.
    """
    parts, begin, place = [], 0, 0
    for shape in shapes:
        size = shape.numel()
        chunk = -(-size // ranks)
        if by_matrix:
            left = [min(max(size - rank * chunk, 0), chunk) for rank in range(ranks)]
            parts.append(tuple(slice(place, place + one) for one in left))
        else:
            runs = [begin - rank * elements for rank in range(ranks)]  # start relative to a piece
            bounds = [(max(low, 0), min(low + size, elements)) for low in runs]
            parts.append(tuple(slice(low, max(low, high)) for low, high in bounds))
        begin, place = begin + size, place + chunk
    loads, owners = [0] * ranks, [0] * len(shapes)
    for matrix in sorted(range(len(shapes)), key=lambda one: -_work(shapes[one])):
        owners[matrix] = loads.index(min(loads))
        loads[owners[matrix]] += _work(shapes[matrix])
    return FlatMatrices(tuple(shapes), tuple(parts), tuple(owners))


def _size(part: slice) -> int:
    return int(part.stop - (part.start or 0))


def _work(shape: torch.Size) -> int:
    """Return the multiplications of one iteration of `orthogonal`."""
    short, long = sorted(shape)
    return 2 * short * short * long + short**3


def fused_adamw(groups: list[dict[str, Any]], optimizer: OptimizerConfig) -> torch.optim.AdamW:
    """Build torch's fused AdamW, which needs no compiler and resumes bit for bit."""
    return torch.optim.AdamW(
        groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Updates groups with `matrices` set by Muon, and the others by torch's fused AdamW.

    Attributes:
        layouts: Of the flat parameters; a parameter without one is itself a matrix.
    """

    def __init__(self, groups: list[dict[str, Any]], *, optimizer: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": optimizer.lr, "momentum": MOMENTUM})
        self.layouts: dict[Tensor, FlatMatrices] = {}
        # The same dictionaries, in which it sets its own defaults.
        self._adamw = fused_adamw(self._others(), optimizer)

    _step_supports_amp_scaling = True  # `found_inf` of 1 leaves weights and states unchanged
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update."""
        for group in self.param_groups:
            for parameter in group["params"] if group["matrices"] else ():
                if parameter.grad is not None:
                    self._update_matrices(parameter, group)
        self._adamw.param_groups = self._others()  # a load replaces both
        self._adamw.state = self.state
        if self.found_inf is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["matrices"]]

    def _update_matrices(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a matrix, or a flat piece, by orthogonalized Nesterov momentum."""
        gradient, state, skip = parameter.grad, self.state[parameter], self.found_inf
        assert gradient is not None  # checked by the caller
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        made = 1.0 if skip is None else 1 - skip

        def ahead(part: slice) -> Tensor:
            new, momentum = gradient[part], state["momentum_buffer"][part]
            if skip is not None:
                new = new.where(skip == 0, momentum)  # no change
            momentum.lerp_(new, 1 - group["momentum"])
            return new.lerp(momentum, group["momentum"])

        def apply(part: slice, update: Tensor) -> None:
            weights = parameter[part]
            decay = made * group["lr"] * group["weight_decay"]
            if group["cautious"]:  # Chen et al. 2025, Cautious weight decay, algorithm 1
                decay = decay * (update * weights >= 0)
            weights.mul_(1 - decay)
            weights.sub_(update.mul_(made * group["lr"]))

        layout, moments = self.layouts.get(parameter), None
        if (axis := group["normalized_axis"]) is not None:
            shapes = [parameter.shape] if layout is None else layout.shapes
            if OUTPUT_MOMENTS not in state:
                outputs = sum(shape[axis] for shape in shapes)
                state[OUTPUT_MOMENTS] = parameter.new_zeros(outputs)
            moments = Moments(state[OUTPUT_MOMENTS], axis, made * (1 - MOMENT_DECAY))
        if layout is None:
            apply(slice(None), scaled_orthogonal(ahead(slice(None)), moments))
        else:
            layout.update(ahead, apply, moments)


def scaled_orthogonal(matrix: Tensor, moments: Moments | None = None) -> Tensor:
    """Return `orthogonal` of a matrix, scaled to the size of AdamW's update, in float32."""
    update = orthogonal(matrix)
    if moments is not None:
        update = moments.equalize(update, moments.values)
    return update.float() * size_of_update(matrix.shape)


def size_of_update(shape: torch.Size) -> float:
    """Return the factor that scales an orthogonal matrix to an update."""
    return RMS_OF_ADAMW * math.sqrt(max(shape))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix `[m, n]` with all singular values near 1, by Newton-Schulz, in bfloat16."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = matrix.bfloat16().to(iteration_type(matrix.device.type))
    if rows > columns:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        # Each addition inside its product, as in torch.optim.Muon: one rounding to bfloat16, not
        # three, halves the error of the result (2.3e-2 to 1.0e-2 of a float64 iteration).
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    result: Tensor = (x.T if rows > columns else x).bfloat16()
    return result


@functools.cache
def iteration_type(device: str) -> torch.dtype:
    """Return bfloat16; float32 on processors without its instructions, 4 times as fast there."""
    slow = device == "cpu" and not BF16_FLAGS.keys() & cpu_flags()
    return torch.float32 if slow else torch.bfloat16


def output_axis(model: nn.Module) -> int:
    """Return the axis of a layer's outputs in its weight: 1 if the blocks are of Conv1D, else 0."""
    from transformers.pytorch_utils import Conv1D

    return int(any(isinstance(module, Conv1D) for module in model.modules()))


def block_matrices(model: nn.Module, block_class: type[nn.Module]) -> list[nn.Parameter]:
    """Return the matrices that Muon updates: the weights of linear layers inside blocks."""
    from transformers.pytorch_utils import Conv1D

    blocks = (module for module in model.modules() if isinstance(module, block_class))
    layers = (layer for block in blocks for layer in block.modules())
    linear = (layer for layer in layers if isinstance(layer, nn.Linear | Conv1D))
    weights: list[Any] = [layer.weight for layer in linear if layer.weight.requires_grad]
    return list(dict.fromkeys(weights))


def set_layouts(zero_optimizer: Any, *, stage: int) -> None:
    """Set the layouts of a Muon optimizer inside DeepSpeed's; raise ConfigError if unsupported."""
    muon = getattr(zero_optimizer, "optimizer", zero_optimizer)
    if not isinstance(muon, MuonAndAdamW) or stage == 0:
        return
    if getattr(zero_optimizer, "round_robin_gradients", False):
        raise ConfigError(
            "optimizer.kind=muon does not support zero_optimization.round_robin_gradients, which "
            "reorders parameters. Remove it from zero.fragment."
        )
    for number, (piece, parameters) in enumerate(flat_groups(zero_optimizer)):
        group = zero_optimizer.sub_group_to_group_id[number] if stage == 3 else number
        if muon.param_groups[group]["matrices"]:
            muon.layouts[piece] = flat_matrices(
                [getattr(p, "ds_shape", p.shape) for p in parameters],
                ranks=torch.distributed.get_world_size(),
                elements=len(piece),
                by_matrix=stage == 3,
            )


def build_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, *, block_class: type[nn.Module] | None = None
) -> torch.optim.Optimizer:
    """Build torch's fused AdamW, or Muon for the matrices of the repeated block.

    Weight decay applies to matrices and embeddings, not to biases and norms. Tied weights are
    updated once. Embeddings and head have a group of their own if they have any setting of their
    own.
    """
    chosen: list[nn.Parameter] = []
    if optimizer.kind == "muon":
        assert block_class is not None
        chosen = block_matrices(model, block_class)
    roles = {id(p): "matrix" for p in chosen}
    if optimizer.has_group("embedding"):
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
        roles |= {id(module.weight): "embedding" for module in tables}
    members: dict[str, list[nn.Parameter]] = {"matrix": chosen}
    members |= {role: [] for role in ("embedding", "head", "other", "scalar")}
    for name, parameter in model.named_parameters():  # tied ones once
        is_head = optimizer.has_group("head") and name.endswith("lm_head.weight")
        of_shape = "scalar" if parameter.dim() < 2 else "head" if is_head else "other"
        if parameter.requires_grad and (role := roles.get(id(parameter), of_shape)) != "matrix":
            members[role].append(parameter)
    groups: list[dict[str, Any]] = []
    for role, parameters in members.items():
        decay = getattr(optimizer, f"{role}_decay", None)
        decay = optimizer.weight_decay if decay is None else decay
        group: dict[str, Any] = {
            "params": parameters,
            "lr_share": (getattr(optimizer, f"{role}_lr", None) or optimizer.lr) / optimizer.lr,
            "full_decay": 0.0 if role == "scalar" else decay,
            "matrices": role == "matrix",
        }
        group["weight_decay"] = group["full_decay"]
        if role == "matrix":
            group["cautious"] = optimizer.cautious_decay
            group["normalized_axis"] = output_axis(model) if optimizer.normuon else None
        else:
            group["betas"] = getattr(optimizer, f"{role}_betas", None) or optimizer.betas
        if parameters:
            groups.append(group)
    if optimizer.kind == "muon":
        return MuonAndAdamW(groups, optimizer=optimizer)
    return fused_adamw(groups, optimizer)


def set_rates(
    optimizer: Any, learning_rate: float, *, momentum: float = MOMENTUM, decay_share: float = 1.0
) -> None:
    """Set each group's learning rate, weight decay and, for Muon's, momentum of an update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_share"]
        group["weight_decay"] = decay_share * group["full_decay"]
        if group["matrices"]:
            group["momentum"] = momentum


def capture_settings(optimizer: Any) -> Callable[[Any], None]:
    """Return a function that restores the configured settings after a load overwrote them.

    These are the settings of each group, the clipping norm, and the number of steps without
    overflow before fp16's loss scale doubles.
    """
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    clip = getattr(optimizer, "clip_grad", None)
    window = getattr(_scaler(optimizer), "scale_window", None)

    def restore(loaded: Any) -> None:
        for group, configured in zip(loaded.param_groups, groups, strict=True):
            group.update(configured)
        if clip is not None:
            loaded.clip_grad = clip
        if window is not None:
            _scaler(loaded).scale_window = window

    return restore


def _scaler(optimizer: Any) -> Any:
    """Return the loss scaler of a DeepSpeed optimizer, at stage 0 or above, if any."""
    return getattr(optimizer, "loss_scale_config", getattr(optimizer, "loss_scaler", None))
