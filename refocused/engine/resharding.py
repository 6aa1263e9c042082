"""Load optimizer states saved by another number of ranks, or under another ZeRO stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.engine import zero_layout
from refocused.engine.optimizer import OUTPUT_MOMENTS, MuonAndAdamW
from refocused.engine.state_files import read_state
from refocused.system.errors import CheckpointError

# Fills a flat tensor `[n]` with a parameter's elements, from the given one on.
FillWeights = Callable[[Tensor, str, int], None]
SWAPPED = "offloaded_tensors"  # DeepSpeed's folder for the files of an NVMe drive
MASTER = "master"  # the float32 weight
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
MUON_KINDS = (MASTER, "momentum_buffer")  # of the matrices that Muon updates


def reshard(engine: Any, folder: Path, *, ranks: int) -> None:
    """Load saved states into a freshly built DeepSpeed engine; collective.

    Each rank copies its part out of the memory-mapped files. DeepSpeed's universal checkpoints
    would write all states to the disk again, and their loader (0.19.8) gives every group the first
    one's weight decay and all groups of stage 3 one shared step counter. Raises CheckpointError if
    the parameters are not those of this model, or states are on NVMe.
    """
    from refocused.engine.shard_files import loss_scaler  # needs DeepSpeed, unlike `SavedStates`

    if engine.zero_nvme_offload_optimizer() or (folder / SWAPPED).exists():
        raise CheckpointError(
            "Optimizer states on an NVMe drive (zero.offload_optimizer=nvme) cannot be resharded. "
            f"Resume on {ranks:,} ranks, with zero.* and precision.dtype as in the checkpoint's "
            "run.yaml."
        )
    saved = SavedStates(folder, ranks=ranks)
    _require_same_parameters(engine, saved)
    _refill(
        engine.optimizer,
        lambda masters, own: _fill(engine.optimizer.optimizer, masters, own, saved),
    )
    moments = saved.output_moments
    for masters, _ in zero_layout.flat_groups(engine.optimizer):
        filled = _fill_output_moments(engine.optimizer.optimizer, masters, moments)
        moments = moments[filled:]
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
                fill(masters.data.narrow(0, part.place, part.size), part.name, part.start)

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
    fragments = list(_own_fragments(optimizer))
    with torch.no_grad():
        for number, (masters, _) in enumerate(zero_layout.flat_groups(optimizer)):
            fill(masters, [fragment for fragment in fragments if fragment.group == number])
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            _lower_stage_3(optimizer)
        else:
            optimizer.update_lp_params()
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()


def _fill(
    adam: torch.optim.Optimizer,
    masters: Tensor,
    fragments: list[zero_layout.Fragment],
    saved: SavedStates,
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
            saved.fill(flat.narrow(0, part.place, part.size), part.name, kind, start=part.start)
    if not saved.step:
        state.clear()  # as before Adam's first update
    elif not is_muon:
        # One tensor per group: Adam increments it in place.
        state["step"] = torch.tensor(saved.step, dtype=torch.float32, device=masters.device)


def _fill_output_moments(adam: torch.optim.Optimizer, masters: Tensor, values: Tensor) -> int:
    """Copy NorMuon's moments of one flat group's matrices; return the number of values."""
    if not isinstance(adam, MuonAndAdamW) or masters not in adam.layouts or not len(values):
        return 0
    axis = next(group["normalized_axis"] for group in adam.param_groups if group["matrices"])
    if axis is None:  # no longer set
        return 0
    count: int = sum(shape[axis] for shape in adam.layouts[masters].shapes)
    adam.state[masters][OUTPUT_MOMENTS] = values[:count].to(masters.device, copy=True)
    return count


def _own_fragments(optimizer: Any) -> Iterator[zero_layout.Fragment]:
    """Yield the fragments of the parameters in this rank's flat groups."""
    rank = torch.distributed.get_rank()
    groups = zero_layout.flat_groups(optimizer)
    names = optimizer.param_names
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        sizes = [masters.numel() for masters, _ in groups]
        shapes = {names[p]: p.ds_shape for _, parameters in groups for p in parameters}
        ranks = torch.distributed.get_world_size()
        yield from zero_layout.sharded_fragments(sizes, shapes, rank=rank, ranks=ranks)
        return
    for number, (_, parameters) in enumerate(groups):
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:
                low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                name = names[parameter]
                yield zero_layout.Fragment(rank, number, name, low.start, low.numel, high.start)


def _lower_stage_3(optimizer: Any) -> None:
    """Copy the masters, rounded, into the 16-bit weights."""
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


def _require_same_parameters(engine: Any, saved: SavedStates) -> None:
    """Raise CheckpointError for the states of another model, before anything is loaded."""
    wanted = {
        name: getattr(parameter, "ds_numel", parameter.numel())
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    found = saved.sizes()
    odd = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if odd:
        raise CheckpointError(
            f"The checkpoint's optimizer has {found.get(odd[0], 'no')} elements of {odd[0]}, but "
            f"this model has {wanted.get(odd[0], 'none')} ({len(odd)} such parameters). Resume "
            "with the model of the checkpoint."
        )


class SavedStates:
    """The optimizer states of all ranks, in memory-mapped files.

    Attributes:
        step: Adam's step count; 0: no moments yet (fp16 may have skipped all updates).
        globals: Rank 0's file: loss scaler, overflow.
        counters: Steps and samples as DeepSpeed counts them.
        shapes: Of the parameters, by name.
        output_moments: NorMuon's, of all matrices in their order, which every rank holds.
    """

    def __init__(self, folder: Path, *, ranks: int) -> None:
        """Open the files of `ranks` ranks; raises CheckpointError if their form is unknown."""
        states = [_optimizer_state(folder, rank) for rank in range(ranks)]
        model_file = next(
            path for path in folder.iterdir() if zero_layout.model_file_rank(path.name) == 0
        )
        model = read_state(model_file, mapped=True)
        self.globals: Mapping[str, Any] = states[0]
        self.counters = {
            key: int(model[key]) for key in ("global_steps", "global_samples", "skipped_steps")
        }
        groups = [_flat_tensors(state) for state in states]
        # Muon has no step count.
        self.step = max(float(one.get("step", 0.0)) for of_rank in groups for one in of_rank)
        moments = [one[OUTPUT_MOMENTS] for one in groups[0] if OUTPUT_MOMENTS in one]
        self.output_moments = torch.cat(moments) if moments else torch.zeros(0)
        self._pieces: dict[str, list[tuple[zero_layout.Fragment, Mapping[str, Tensor]]]] = {}
        self.shapes = zero_layout.shapes_of(model[zero_layout.PARAM_SHAPES])
        for fragment in zero_layout.saved_fragments(states, self.shapes):
            tensors = groups[fragment.rank][fragment.group]
            self._pieces.setdefault(fragment.name, []).append((fragment, tensors))

    def sizes(self) -> dict[str, int]:
        """Return the number of saved elements of each parameter."""
        return {
            name: sum(fragment.size for fragment, _ in pieces)
            for name, pieces in self._pieces.items()
        }

    def fill(self, target: Tensor, name: str, kind: str, *, start: int) -> None:
        """Fill a tensor `[n]` from an element of a parameter, or of its moment `kind`, on."""
        end = start + target.numel()
        for fragment, tensors in self._pieces[name]:
            first, last = max(start, fragment.start), min(end, fragment.start + fragment.size)
            if first < last:
                place = fragment.place + first - fragment.start
                source = tensors[kind].narrow(0, place, last - first)
                target[first - start : last - start].copy_(source)


def _optimizer_state(folder: Path, rank: int) -> Mapping[str, Any]:
    found = [
        path for path in folder.iterdir() if zero_layout.optimizer_file_rank(path.name) == rank
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} has {len(found)} optimizer files of rank {rank} instead of one, so it was "
            "not saved by ZeRO 1, 2 or 3. Resume with the zero.stage of the checkpoint."
        )
    content: Mapping[str, Any] = read_state(found[0], mapped=True)[zero_layout.OPTIMIZER]
    return content


def _flat_tensors(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the masters and moments of each of a rank's flat groups."""
    adam = state.get("base_optimizer_state") or state[zero_layout.OPTIMIZER]
    masters = enumerate(state[zero_layout.masters_key(state)])
    return [{MASTER: master, **adam["state"].get(index, {})} for index, master in masters]
