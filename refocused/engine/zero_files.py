"""Read the tensors of a checkpoint's ZeRO files, whatever stage and number of ranks saved them."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.engine import zero_layout
from refocused.engine.state_files import read_state
from refocused.engine.zero_layout import OUTPUT_MOMENTS
from refocused.system.errors import CheckpointError, as_typed

MASTER = "master"  # the float32 weight, beside the optimizer's own names of its moments
COMPARED_ELEMENTS = 1024  # of a master and its half-precision weight, to match them


class ZeroFiles:
    """The states of all ranks below one checkpoint's `zero/`, memory-mapped.

    Attributes:
        shapes: Shape of each tensor of the module, by name and in its order; tied ones once.
        ties: Further names of tensors, and the name that each is stored under.
        trained: Shapes of the parameters that ZeRO 1, 2 or 3 updates; empty at stage 0.
        step: Adam's step count; 0: no moments yet (fp16 may have skipped all updates).
        globals: Rank 0's states: loss scaler, overflow. Empty at stage 0.
        counters: Steps and samples as DeepSpeed counts them.
        output_moments: NorMuon's, of all matrices in their order, which every rank holds.
    """

    def __init__(self, folder: Path, *, ranks: int) -> None:
        """Open the files of `ranks` ranks.

        Raises CheckpointError if one is missing, if they do not hold every element exactly once, or
        if their form is unknown.
        """
        self._folder, self._ranks = folder, ranks
        model, optimizer = self._paths("model"), self._paths("optimizer")
        try:
            self._read(model, [read_state(path, mapped=True) for path in optimizer])
        except zero_layout.FORM_ERRORS as error:
            raise self._unknown_form(f"{type(error).__name__}: {error!s:.100}") from None

    def fill(self, target: Tensor, name: str, kind: str = MASTER, *, start: int = 0) -> None:
        """Fill a tensor `[n]` from an element of a parameter, or of its moment `kind`, on."""
        end = start + target.numel()
        for fragment, tensors in self._pieces[name]:
            first, last = max(start, fragment.start), min(end, fragment.start + fragment.size)
            if first < last:
                offset = fragment.offset + first - fragment.start
                source = tensors[kind].narrow(0, offset, last - first)
                target[first - start : last - start].copy_(source)

    def _paths(self, kind: str) -> list[Path]:
        """Return the files of a kind, by rank.

        Below stage 3, rank 0's model file holds the whole module; stage 0 has no optimizer files.
        """
        is_model = kind == "model"
        rank_of = zero_layout.model_file_rank if is_model else zero_layout.optimizer_file_rank
        by_rank = [(rank_of(path.name), path) for path in self._folder.iterdir()]
        ranked = sorted((rank, path) for rank, path in by_rank if rank is not None)
        counts = (1, self._ranks) if is_model else (0, self._ranks)
        if len(ranked) not in counts or [rank for rank, _ in ranked] != [*range(len(ranked))]:
            raise CheckpointError(
                f"{self._folder} has {len(ranked)} {kind} files, and {self._ranks:,} ranks have "
                "saved it. Resume with the zero.stage of the checkpoint, or choose another: "
                f"{as_typed('checkpoints list')}"
            )
        return [path for _, path in ranked]

    def _read(self, model_files: Sequence[Path], optimizer: Sequence[Mapping[str, Any]]) -> None:
        model: Mapping[str, Any] = read_state(model_files[0], mapped=True)
        shards = [content[zero_layout.OPTIMIZER] for content in optimizer]
        flat = [_flat_tensors(shard) for shard in shards]
        self.globals: Mapping[str, Any] = shards[0] if shards else {}
        self.counters = {
            key: int(model[key]) for key in ("global_steps", "global_samples", "skipped_steps")
        }
        groups = [group for of_rank in flat for group in of_rank]
        # Muon has no step count.
        self.step = max((float(group.get("step", 0.0)) for group in groups), default=0.0)
        moments = [
            m[OUTPUT_MOMENTS] for of_rank in flat[:1] for m in of_rank if OUTPUT_MOMENTS in m
        ]
        self.output_moments = torch.cat(moments) if moments else torch.zeros(0)
        self.trained = zero_layout.shapes_of(model[zero_layout.PARAM_SHAPES] if shards else [])
        # The fragments of each tensor in its order, each with the flat tensors that it lies in.
        self._pieces: collections.defaultdict[
            str, list[tuple[zero_layout.Fragment, Mapping[str, Tensor]]]
        ] = collections.defaultdict(list)
        for fragment in zero_layout.saved_fragments(shards, self.trained):
            self._pieces[fragment.name].append((fragment, flat[fragment.rank][fragment.group]))
        module: Mapping[str, Tensor] = model["module"]
        self.ties = _ties(module, model["shared_params"])
        own_names = [name for name in module if name not in self.ties]
        weights = {name: module[name] for name in own_names if name not in model["buffer_names"]}
        if not shards and any(weight.dtype != torch.float32 for weight in weights.values()):
            for name, master in self._masters_at_stage_0(model["optimizer"], weights).items():
                self._add_part(name, master)
        shapes = dict(self.trained)
        if shards and zero_layout.SHARDED_MASTERS in shards[0]:
            shapes |= zero_layout.shapes_of([model[zero_layout.FROZEN_SHAPES] or {}])
            frozen = [name for name in shapes if name not in self.trained]
            # Split like the others, but without masters.
            for rank, path in enumerate(model_files if frozen else ()):
                parts = read_state(path, mapped=True)[zero_layout.FROZEN_FRAGMENTS]
                for name in frozen:
                    count = math.prod(shapes[name])
                    share = zero_layout.share(count, self._ranks)
                    begin = min(rank * share, count)  # what follows the last element is padding
                    self._add_part(name, parts[name], begin, min(share, count - begin))
        for name in own_names:  # buffers, and below stage 3 frozen parameters have no masters
            if name not in self._pieces and module[name].numel():
                self._add_part(name, module[name])
        self.shapes = {name: tuple(shapes.get(name, module[name].shape)) for name in own_names}
        for name, shape in {**self.trained, **self.shapes}.items():
            pieces, count = self._pieces[name], math.prod(shape)
            size = sum(fragment.size for fragment, _ in pieces)
            if size != count or any(fragment.size < 0 for fragment, _ in pieces):
                raise self._unknown_form(f"it has {size:,} elements of {name}, not {count:,}")
            for fragment, tensors in pieces:
                end = fragment.offset + fragment.size
                if not 0 <= fragment.offset <= end <= tensors[MASTER].numel():
                    raise self._unknown_form(f"it lacks elements of {name}")

    def _add_part(self, name: str, tensor: Tensor, start: int = 0, size: int | None = None) -> None:
        """Add elements of a parameter, from `start` on, that a tensor begins with."""
        size = tensor.numel() if size is None else size
        part = zero_layout.Fragment(rank=0, group=0, name=name, start=start, size=size, offset=0)
        self._pieces[name].append((part, {MASTER: tensor.detach().flatten()}))

    def _masters_at_stage_0(
        self, optimizer: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Find the optimizer's whole float32 copies.

        They have no names. The optimizer's groups are subsequences of the module's parameters
        (runtime/fp16/unfused_optimizer.py keeps them as the client optimizer got them), here of
        different dimensions, so that shapes show which group is next; and a copy's first elements
        must round to the module's own.
        """
        left: list[list[Tensor]] = [list(group) for group in optimizer["fp32_groups"]]
        masters, some = {}, slice(COMPARED_ELEMENTS)
        for name, weight in weights.items():
            for group in left:
                if (
                    group
                    and group[0].shape == weight.shape
                    and torch.equal(
                        group[0].flatten()[some].to(weight.dtype), weight.flatten()[some]
                    )
                ):
                    masters[name] = group.pop(0)
                    break
        if any(left):
            raise self._unknown_form("its float32 masters are not those of its weights")
        return masters

    def _unknown_form(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder} is not as DeepSpeed 0.19 writes it: {what}. Use the version of "
            "refocused that wrote the checkpoint, or choose another step."
        )


def _flat_tensors(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the masters and moments of each of a rank's flat groups."""
    adam = state.get("base_optimizer_state") or state[zero_layout.OPTIMIZER]
    masters = enumerate(state[zero_layout.masters_key(state)])
    return [{MASTER: master, **adam["state"].get(index, {})} for index, master in masters]


def _ties(module: Mapping[str, Tensor], shared: Mapping[str, str] | None) -> dict[str, str]:
    """Return further names of tensors; stage 0 does not list them, but saves a storage once."""
    if shared is not None:
        return dict(shared)
    first: dict[tuple[int, int], str] = {}
    firsts = {
        name: first.setdefault((tensor.data_ptr(), tensor.numel()), name)
        for name, tensor in module.items()
    }
    return {name: other for name, other in firsts.items() if name != other}
