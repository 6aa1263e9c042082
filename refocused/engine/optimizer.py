"""Which parameters are updated how: matrices decay, biases and norms do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from refocused.config.optimization import OptimizerConfig
from refocused.engine.muon import MuonAndAdamW, block_matrices, fused_adamw


def build_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, *, block_class: type[nn.Module] | None = None
) -> torch.optim.Optimizer:
    """Build torch's fused AdamW, or Muon for the matrices of the repeated block.

    Embeddings count as matrices. A tied weight is in one group once.
    """
    trained = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    chosen: list[nn.Parameter] = []
    if optimizer.kind == "muon":
        assert block_class is not None  # a model's role for Muon is known by its blocks
        chosen = block_matrices(model, block_class)
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
        return MuonAndAdamW(groups, optimizer=optimizer)
    return fused_adamw(groups, optimizer)


def keep_settings(optimizer: Any) -> Callable[[Any], None]:
    """Keep the configured settings of an optimizer that was just built.

    Returns:
        What puts them back into the optimizer after a load, which brings the checkpoint's: each
        group's, the largest norm where the optimizer itself clips, and the steps without overflow
        before fp16's loss scale doubles.
    """
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    clip = getattr(optimizer, "clip_grad", None)
    window = getattr(_scaler(optimizer), "scale_window", None)

    def put_back(loaded: Any) -> None:
        for group, configured in zip(loaded.param_groups, groups, strict=True):
            group.update(configured)
        if clip is not None:
            loaded.clip_grad = clip
        if window is not None:
            _scaler(loaded).scale_window = window

    return put_back


def _scaler(optimizer: Any) -> Any:
    """Return what holds a DeepSpeed optimizer's loss scale, at stage 0 or above; None: nothing."""
    return getattr(optimizer, "loss_scale_config", getattr(optimizer, "loss_scaler", None))
