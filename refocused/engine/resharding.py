"""Load optimizer states saved by another number of ranks, or under another ZeRO stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.engine import zero_layout
from refocused.engine.optimizer import MuonAndAdamW
from refocused.engine.zero_files import MASTER, ZeroFiles
from refocused.engine.zero_layout import OUTPUT_MOMENTS
from refocused.system.errors import CheckpointError

# Fills a flat tensor `[n]` with a parameter's elements, from the given one on.
FillWeights = Callable[[Tensor, str, int], None]
SWAPPED = "offloaded_tensors"  # DeepSpeed's folder for the files of an NVMe drive
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
MUON_KINDS = (MASTER, "momentum_buffer")  # of the matrices that Muon updates


def reshard(engine: Any, folder: Path, *, ranks: int) -> None:
    """Load saved states into a freshly built DeepSpeed engine; collective.

    Each rank copies its part out of the memory-mapped files. DeepSpeed's universal checkpoints
    would write all states to the disk again, and their loader (0.19.8) gives every group the first
    one's weight decay and all groups of stage 3 one shared step counter. Raises CheckpointError if
    the parameters are not those of this model, or states are on NVMe.
    """
    from refocused.engine.shard_files import loss_scaler  # needs DeepSpeed, unlike `load_weights`

    if engine.zero_nvme_offload_optimizer() or (folder / SWAPPED).exists():
        raise CheckpointError(
            "Optimizer states on an NVMe drive (zero.offload_optimizer=nvme) cannot be resharded. "
            f"Resume on {ranks:,} ranks, with zero.* and precision.dtype as in the checkpoint's "
            "run.yaml."
        )
    saved = ZeroFiles(folder, ranks=ranks)
    saved_sizes = {name: math.prod(shape) for name, shape in saved.trained.items()}
    sizes = {
        name: getattr(parameter, "ds_numel", parameter.numel())
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    names = {*sizes, *saved_sizes}
    if odd := sorted(name for name in names if sizes.get(name) != saved_sizes.get(name)):
        raise CheckpointError(
            f"The checkpoint's optimizer has {saved_sizes.get(odd[0], 'no')} elements of {odd[0]}, "
            f"but this model has {sizes.get(odd[0], 'none')} ({len(odd)} such parameters). Resume "
            "with the model of the checkpoint."
        )
    _refill(
        engine.optimizer,
        lambda masters, own: _fill(engine.optimizer.optimizer, masters, own, saved),
    )
    adam, moments = engine.optimizer.optimizer, saved.output_moments
    if isinstance(adam, MuonAndAdamW):
        axis = next(group["normalized_axis"] for group in adam.param_groups if group["matrices"])
        for masters, _ in zero_layout.flat_groups(engine.optimizer):
            # Each flat group's matrices take the next of NorMuon's moments; no axis: not set now.
            if masters in adam.layouts and len(moments) and axis is not None:
                count = sum(shape[axis] for shape in adam.layouts[masters].shapes)
                first = moments[:count].to(masters.device, copy=True)
                adam.state[masters][OUTPUT_MOMENTS], moments = first, moments[count:]
    scaler = saved.globals.get(zero_layout.LOSS_SCALER)  # of fp16
    if engine.fp16_enabled() and scaler is not None and saved.globals["dynamic_loss_scale"]:
        engine.optimizer.loss_scaler = loss_scaler(scaler)
        engine.optimizer.overflow = saved.globals["overflow"]
    for name, value in saved.counters.items():
        setattr(engine, name, value)


def load_weights(engine: Any, fill: FillWeights) -> None:
    """Replace the weights of a freshly built DeepSpeed engine, exactly in its float32 masters.

    Each rank reads only the elements that it owns. Optimizer states stay as they are.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "param_names"):  # of ZeRO 1, 2 and 3

        def fill_group(masters: Tensor, own: list[zero_layout.Fragment]) -> None:
            for part in own:
                fill(masters.data.narrow(0, part.offset, part.size), part.name, part.start)

        _refill(optimizer, fill_group)
        return
    halves, masters = (getattr(optimizer, name, []) for name in ("fp16_groups", "fp32_groups"))
    exact = dict(zip(itertools.chain(*halves), itertools.chain(*masters), strict=True))
    with torch.no_grad():
        for name, weight in engine.module.named_parameters():
            master = exact.get(weight, weight)
            fill(master.data.view(-1), name, 0)
            if master is not weight:
                weight.copy_(master)


def _refill(optimizer: Any, fill: Callable[[Tensor, list[zero_layout.Fragment]], None]) -> None:
    """Fill each flat group of masters, given this rank's fragments of it; then round the weights.

    Collective; for ZeRO 1, 2 and 3.
    """
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    groups, names = zero_layout.flat_groups(optimizer), optimizer.param_names
    is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    rank, fragments = torch.distributed.get_rank(), list[zero_layout.Fragment]()
    if is_stage_3:
        sizes = [masters.numel() for masters, _ in groups]
        shapes = {names[p]: p.ds_shape for _, parameters in groups for p in parameters}
        ranks = torch.distributed.get_world_size()
        fragments += zero_layout.sharded_fragments(sizes, shapes, rank=rank, ranks=ranks)
    for number, (_, parameters) in enumerate(() if is_stage_3 else groups):
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:
                low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                address = names[parameter], low.start, low.numel, high.start
                fragments.append(zero_layout.Fragment(rank, number, *address))
    with torch.no_grad():
        for number, (masters, _) in enumerate(groups):
            fill(masters, [fragment for fragment in fragments if fragment.group == number])
        if is_stage_3:  # round the masters into the 16-bit weights
            for masters, flat, weights in zip(
                optimizer.fp32_partitioned_groups_flat,
                optimizer.fp16_partitioned_groups_flat,
                optimizer.fp16_partitioned_groups,
                strict=True,
            ):
                flat.data.copy_(masters.data)
                for weight, values in zip(weights, optimizer.unflatten(flat, weights), strict=True):
                    weight.data = values.data
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        else:
            optimizer.update_lp_params()
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()


def _fill(
    adam: torch.optim.Optimizer,
    masters: Tensor,
    fragments: list[zero_layout.Fragment],
    saved: ZeroFiles,
) -> None:
    """Copy masters and moments of one flat group; padding stays zero."""
    state = adam.state[masters]
    is_muon = isinstance(adam, MuonAndAdamW) and masters in adam.layouts
    kinds = MUON_KINDS if is_muon else KINDS
    for kind in kinds if saved.step else (MASTER,):
        if kind != MASTER and kind not in state:
            state[kind] = torch.zeros_like(masters)
        flat = masters.data if kind == MASTER else state[kind]
        for part in fragments:
            saved.fill(flat.narrow(0, part.offset, part.size), part.name, kind, start=part.start)
    if not saved.step:
        state.clear()  # as before Adam's first update
    elif not is_muon:
        # One tensor per group: Adam increments it in place.
        state["step"] = torch.tensor(saved.step, dtype=torch.float32, device=masters.device)
