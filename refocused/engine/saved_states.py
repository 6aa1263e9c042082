"""What the ranks of a ZeRO run saved, read parameter by parameter for any other number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.engine.checkpoint_files import load_checked
from refocused.errors import CheckpointError

MASTER = "master"  # the float32 weight
KINDS = (MASTER, "exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """A run of elements of one parameter inside a rank's flat tensor.

    Attributes:
        name: The parameter's name.
        start: Its first element, counted in the flattened parameter.
        size: Elements.
        place: Where it begins in the flat tensor.
    """

    name: str
    start: int
    size: int
    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class SavedGroup:
    """One flat group of one rank: masters and both moments of the same elements.

    Before its first update Adam has no moments: fp16 may have skipped all updates so far.
    """

    tensors: Mapping[str, Tensor]
    step: float


class SavedStates:
    """The optimizer's states of all ranks together.

    The files are memory-mapped: only what is copied is read, and nothing is held.

    Attributes:
        step: Updates that Adam counts; 0: it has no moments yet.
        globals: What the first rank's file says of the run: loss scaler, overflow.
        counters: Steps and samples as DeepSpeed counts them.
    """

    def __init__(self, folder: Path, *, ranks: int) -> None:
        """Open the files in `folder` that `ranks` ranks wrote under ZeRO 1, 2 or 3.

        Raises:
            CheckpointError: They are of another form than this DeepSpeed writes.
        """
        self._folder = folder
        self._pieces: dict[str, list[tuple[Fragment, SavedGroup]]] = {}
        self.step = 0.0
        states = [self._optimizer_file(rank) for rank in range(ranks)]
        model = load_checked(self._model_file(), mapped=True)
        self.globals: Mapping[str, Any] = states[0]
        self.counters = {
            key: int(model[key]) for key in ("global_steps", "global_samples", "skipped_steps")
        }
        sharded = "fp32_flat_groups" in states[0]
        groups = _sharded(states, model["param_shapes"]) if sharded else _partitioned(states)
        for fragment, group in groups:
            self._pieces.setdefault(fragment.name, []).append((fragment, group))
            self.step = group.step

    def sizes(self) -> dict[str, int]:
        """Return how many elements of each parameter are there."""
        return {
            name: sum(fragment.size for fragment, _ in pieces)
            for name, pieces in self._pieces.items()
        }

    def fill(self, target: Tensor, name: str, kind: str, *, start: int) -> None:
        """Copy elements of a parameter, or of one of its moments.

        Args:
            target: A flat tensor `[n]`; n elements are copied.
            name: The parameter.
            kind: One of `KINDS`.
            start: The first of the elements in the flattened parameter.
        """
        end = start + target.numel()
        for fragment, group in self._pieces[name]:
            first, last = max(start, fragment.start), min(end, fragment.start + fragment.size)
            if first < last:
                source = group.tensors[kind].narrow(
                    0, fragment.place + first - fragment.start, last - first
                )
                target[first - start : last - start].copy_(source)

    def _optimizer_file(self, rank: int) -> Mapping[str, Any]:
        found = sorted(self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        if len(found) != 1:
            raise CheckpointError(
                f"{self._folder} has {len(found)} optimizer files of rank {rank}, not one: they "
                "were not saved by ZeRO 1, 2 or 3. Resume with the zero.stage of the checkpoint."
            )
        content: Mapping[str, Any] = load_checked(found[0], mapped=True)["optimizer_state_dict"]
        return content

    def _model_file(self) -> Path:
        return sorted(self._folder.glob("*mp_rank_00_model_states.pt"))[0]


def _partitioned(states: list[Mapping[str, Any]]) -> Iterator[tuple[Fragment, SavedGroup]]:
    """Yield the fragments of ZeRO 1 and 2, which says itself where each lies.

    A group's parameters lie one after another and are cut into equal parts, so that a rank's
    fragment goes on where the rank before it ended.
    """
    reached: dict[str, int] = {}
    for state in states:
        masters = state["single_partition_of_fp32_groups"]
        for index, (master, mapping) in enumerate(
            zip(masters, state["param_slice_mappings"], strict=True)
        ):
            group = _group(master, state["base_optimizer_state"], index)
            for name, address in mapping.items():
                start = reached.get(name, 0)
                reached[name] = start + address.numel
                yield Fragment(name, start, address.numel, address.start), group


def _sharded(
    states: list[Mapping[str, Any]], shapes: list[Mapping[str, torch.Size]]
) -> Iterator[tuple[Fragment, SavedGroup]]:
    """Yield the fragments of ZeRO 3: each parameter is cut into equal parts, the last one padded.

    `ceil(elements / ranks)` elements are a rank's part (DeepSpeed's `partition_parameters`).
    """
    for rank, state in enumerate(states):
        for index, (master, named) in enumerate(
            zip(state["fp32_flat_groups"], shapes, strict=True)
        ):
            group, place = _group(master, state["optimizer_state_dict"], index), 0
            for name, shape in named.items():
                part = -(-shape.numel() // len(states))
                start = min(rank * part, shape.numel())
                yield Fragment(name, start, min(part, shape.numel() - start), place), group
                place += part


def _group(master: Tensor, adam: Mapping[str, Any], index: int) -> SavedGroup:
    moments = adam["state"].get(index)
    if moments is None:
        return SavedGroup({MASTER: master}, 0.0)
    tensors = {MASTER: master, **{kind: moments[kind] for kind in KINDS[1:]}}
    return SavedGroup(tensors, float(moments["step"]))
