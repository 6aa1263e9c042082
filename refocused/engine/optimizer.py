"""Which parameters are updated how: matrices decay, biases and norms do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from refocused.config.optimization import OptimizerConfig
from refocused.engine.muon import MuonAndAdamW, block_matrices


def build_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, *, block_class: type[nn.Module] | None = None
) -> torch.optim.Optimizer:
    """Build torch's fused AdamW, which needs no compiler and resumes bit for bit; or Muon.

    Embeddings count as matrices. A tied weight is in one group once. Muon updates the matrices of
    the repeated block.
    """
    trained = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    decaying, plain = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": optimizer.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if optimizer.kind == "muon":
        assert block_class is not None  # a model's role for Muon is known by its blocks
        matrices = block_matrices(model, block_class)
        chosen = {id(p) for p in matrices}
        groups[0]["params"] = [p for p in decaying if id(p) not in chosen]
        groups.insert(0, {"params": matrices, "weight_decay": optimizer.weight_decay})
        for number, group in enumerate(groups):
            group["matrices"] = number == 0
        return MuonAndAdamW([group for group in groups if group["params"]], optimizer=optimizer)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What the configuration says of an optimizer; a load puts the checkpoint's in its place."""

    groups: tuple[Mapping[str, Any], ...]  # of each parameter group all but its parameters
    clip: float | None  # largest norm of the gradient, where the optimizer itself clips
    # steps without overflow before fp16's loss scale doubles, where there is one
    scale_window: int | None

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerSettings:
        """Read them from an optimizer that was just built."""
        groups = tuple(
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        )
        window = getattr(_scaler(optimizer), "scale_window", None)
        return cls(groups, getattr(optimizer, "clip_grad", None), window)

    def put_back(self, optimizer: Any) -> None:
        """Let them count again after a load."""
        for group, configured in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(configured)
        if self.clip is not None:
            optimizer.clip_grad = self.clip
        if self.scale_window is not None:
            _scaler(optimizer).scale_window = self.scale_window


def _scaler(optimizer: Any) -> Any:
    """Return what holds a DeepSpeed optimizer's loss scale, at stage 0 or above; None: nothing."""
    return getattr(optimizer, "loss_scale_config", getattr(optimizer, "loss_scaler", None))
