"""AdamW over two groups: matrices decay, biases and norms do not."""

from __future__ import annotations

import torch
from torch import nn

from refocused.config.optimization import OptimizerConfig


def build_optimizer(model: nn.Module, optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    """Build torch's fused AdamW, which needs no compiler and resumes bit for bit.

    Embeddings count as matrices. A tied weight is in one group once.
    """
    trained = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )
