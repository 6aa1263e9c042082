"""Build the optimizer: parameter groups, weight decay, and settings kept over a load."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from refocused.config.optimization import OptimizerConfig
from refocused.engine import muon


def build_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, *, block_class: type[nn.Module] | None = None
) -> torch.optim.Optimizer:
    """Build torch's fused AdamW, or Muon for the matrices of the repeated block.

    Weight decay applies to matrices and embeddings, not to biases and norms. Tied weights are
    updated once.
    """
    trained = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    chosen: list[nn.Parameter] = []
    if optimizer.kind == "muon":
        assert block_class is not None
        chosen = muon.block_matrices(model, block_class)
    is_chosen = {id(p) for p in chosen}
    others = [p for p in trained if id(p) not in is_chosen]
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in (
            (chosen, optimizer.weight_decay),
            ([p for p in others if p.dim() >= 2], optimizer.weight_decay),
            ([p for p in others if p.dim() < 2], 0.0),
        )
        if parameters
    ]
    if optimizer.kind == "muon":
        for group in groups:
            group["matrices"] = group["params"] is chosen
            if group["matrices"]:
                group.update(muon.matrix_settings(optimizer, output_axis=muon.output_axis(model)))
        return muon.MuonAndAdamW(groups, optimizer=optimizer)
    return muon.fused_adamw(groups, optimizer)


def set_rates(optimizer: Any, learning_rate: float, *, step: int) -> None:
    """Set each group's learning rate and momentum for the update that follows `step` updates."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_share", 1.0)
        if group.get("matrices"):
            group["momentum"] = muon.momentum_at(step, warmup_steps=group["momentum_warmup_steps"])


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
