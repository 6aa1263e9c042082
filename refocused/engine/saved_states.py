"""What the ranks of a ZeRO run saved, read parameter by parameter for any other number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from refocused.engine.state_files import read_state
from refocused.engine.zero_layout import (
    OPTIMIZER,
    PARAM_SHAPES,
    Fragment,
    masters_key,
    model_file_rank,
    optimizer_file_rank,
    saved_fragments,
    shapes_of,
)
from refocused.system.errors import CheckpointError

MASTER = "master"  # the float32 weight
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
MUON_KINDS = (MASTER, "momentum_buffer")  # of the matrices that Muon updates


@dataclasses.dataclass(frozen=True, slots=True)
class SavedGroup:
    """One flat group of one rank: masters and the optimizer's moments of the same elements.

    Before its first update it has no moments: fp16 may have skipped all updates so far.
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
        model = read_state(self._model_file(), mapped=True)
        self.globals: Mapping[str, Any] = states[0]
        self.counters = {
            key: int(model[key]) for key in ("global_steps", "global_samples", "skipped_steps")
        }
        groups = [_groups(state) for state in states]
        for saved in saved_fragments(states, shapes_of(model[PARAM_SHAPES])):
            group = groups[saved.rank][saved.group]
            self._pieces.setdefault(saved.fragment.name, []).append((saved.fragment, group))
            self.step = max(self.step, group.step)

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
            kind: One of `KINDS` or `MUON_KINDS`, as the parameter has it.
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
        found = [path for path in self._folder.iterdir() if optimizer_file_rank(path.name) == rank]
        if len(found) != 1:
            raise CheckpointError(
                f"{self._folder} has {len(found)} optimizer files of rank {rank}, not one: they "
                "were not saved by ZeRO 1, 2 or 3. Resume with the zero.stage of the checkpoint."
            )
        content: Mapping[str, Any] = read_state(found[0], mapped=True)[OPTIMIZER]
        return content

    def _model_file(self) -> Path:
        return next(path for path in self._folder.iterdir() if model_file_rank(path.name) == 0)


def _groups(state: Mapping[str, Any]) -> list[SavedGroup]:
    """Return a rank's flat groups; ZeRO 3 keeps Adam's state below another key."""
    adam = state.get("base_optimizer_state") or state[OPTIMIZER]
    return [_group(master, adam, index) for index, master in enumerate(state[masters_key(state)])]


def _group(master: Tensor, adam: Mapping[str, Any], index: int) -> SavedGroup:
    moments = adam["state"].get(index)
    if moments is None:
        return SavedGroup({MASTER: master}, 0.0)
    kinds = [kind for kind in (*KINDS, *MUON_KINDS) if kind in moments]
    tensors = {MASTER: master, **{kind: moments[kind] for kind in kinds}}
    return SavedGroup(tensors, float(moments.get("step", 0.0)))  # Muon counts none
