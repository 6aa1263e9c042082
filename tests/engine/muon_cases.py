"""Trainings by Muon to compare: through the engine, and in a plain loop with torch's own Muon."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from engine_cases import LENGTH, OPTIMIZER, RATES, Case, fresh_model, windows
from torch import Tensor

from refocused.engine.muon import scaled_orthogonal

MUON = OPTIMIZER.model_copy(update={"kind": "muon"})
MUON_CASES = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    *(Case(stage, "gpt_neox", "bf16") for stage in (0, 1, 3)),
]


def updates_of_all(
    pieces: list[Tensor], shapes: Sequence[torch.Size], *, by_matrix: bool
) -> list[Tensor]:
    """Return what is wanted of each rank's piece: every matrix computed whole, and cut again."""
    ranks, gathered = len(pieces), torch.stack(pieces)
    wanted, place = torch.zeros_like(gathered), 0
    for shape in shapes:
        size = shape.numel()
        if by_matrix:
            chunk = -(-size // ranks)
            whole = gathered[:, place : place + chunk].flatten()
            update = scaled_orthogonal(whole[:size].view(shape)).flatten()
            padded = torch.nn.functional.pad(update, (0, len(whole) - size))
            wanted[:, place : place + chunk] = padded.view(ranks, chunk)
            place += chunk
        else:
            update = scaled_orthogonal(gathered.flatten()[place : place + size].view(shape))
            wanted.view(-1)[place : place + size] = update.flatten()
            place += size
    return list(wanted)


def train_plainly_by_muon(family: str) -> list[float]:
    """Return the losses of whole batches in float32, on whole matrices."""
    source = fresh_model(family).network
    model = transformers.AutoModelForCausalLM.from_config(source.config)
    model.load_state_dict(source.state_dict())
    named = dict(model.named_parameters())
    matrices = [
        p for name, p in named.items() if p.dim() == 2 and (".h." in name or ".layers." in name)
    ]
    others = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(
        matrices,
        lr=0.0,
        weight_decay=MUON.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() == 2], "weight_decay": MUON.weight_decay},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=MUON.betas,
        eps=MUON.eps,
        foreach=False,
    )
    losses = []
    for rate, step in zip(RATES, windows(), strict=True):
        ids = step.reshape(-1, LENGTH + 1)
        loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MUON.clip)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        losses.append(loss.item())
    return losses
