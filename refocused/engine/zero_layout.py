"""How DeepSpeed 0.19 lays out the files of a ZeRO checkpoint: their names, keys and flat groups.

The one description for those who resume training from them and those who only read weights. It
needs neither torch nor DeepSpeed, and opens no file.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from refocused.system.errors import CheckpointError

# What reading the content of a file raises that is of another form.
FORM_ERRORS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)

OPTIMIZER = "optimizer_state_dict"  # of an optimizer file: everything of one rank
PARAM_SHAPES = "param_shapes"  # of a model file: the trained parameters, group by group
FROZEN_SHAPES = "frozen_param_shapes"
FROZEN_FRAGMENTS = "frozen_param_fragments"
SHARDED_MASTERS = "fp32_flat_groups"  # of ZeRO 3
PARTITIONED_MASTERS = "single_partition_of_fp32_groups"  # of ZeRO 1 and 2
_SLICES = "param_slice_mappings"

FRAGMENT_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"
STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
STAGE_MEMBERS = ("disabled", "optimizer_states", "gradients", "weights")  # of that, by number
LOSS_SCALER = "loss_scaler"  # below `OPTIMIZER`: a mapping of its attributes
LOSS_SCALERS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)

_OPTIMIZER_FILE = re.compile(r"(?:zero/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero/)?(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """A run of elements of one parameter inside one of a rank's flat tensors."""

    rank: int
    group: int  # the number of the flat tensor
    name: str  # the parameter's name
    start: int  # its first element, counted in the flattened parameter
    size: int  # elements
    place: int  # where it begins in the flat tensor


def optimizer_file_rank(name: str) -> int | None:
    """Return whose optimizer file has this name or path; None: it is no such file."""
    found = _OPTIMIZER_FILE.fullmatch(name)
    return None if found is None else int(found[1])


def model_file_rank(name: str) -> int | None:
    """Return whose model file has this name or path; 0: also that of all ranks; None: no such."""
    found = _MODEL_FILE.fullmatch(name)
    return None if found is None else int(found[1] or 0)


def is_of_all_ranks(name: str) -> bool:
    """Whether it is the model file that the first rank writes for all (ZeRO 0, 1 and 2)."""
    found = _MODEL_FILE.fullmatch(name)
    return found is not None and found[1] is None


def is_read_by(name: str, rank: int, *, exact: bool) -> bool:
    """Whether a rank reads a file of `zero/` at a resume.

    If `exact`, each rank reads back what it wrote; otherwise all read the states of all ranks.
    """
    if is_of_all_ranks(name):
        return True
    if exact:
        return rank in (optimizer_file_rank(name), model_file_rank(name))
    return optimizer_file_rank(name) is not None or model_file_rank(name) == 0


def share(count: int, ranks: int) -> int:
    """Return each rank's elements of a parameter under ZeRO 3; the last shares are padded.

    DeepSpeed's runtime/zero/partition_parameters.py, `_partition_param`.
    """
    return -(-count // ranks)


def shapes_of(groups: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes below `PARAM_SHAPES` by name, in the order of the flat groups."""
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def masters_key(state: Mapping[str, Any]) -> str:
    """Return the key of a rank's float32 masters, a list of flat tensors."""
    return SHARDED_MASTERS if SHARDED_MASTERS in state else PARTITIONED_MASTERS


def saved_fragments(
    states: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> Iterator[Fragment]:
    """Yield where each element of each trained parameter is; of one parameter in its order.

    Args:
        states: What each rank's file holds below `OPTIMIZER`, under ZeRO 1, 2 or 3.
        shapes: Of the parameters, see `shapes_of`.

    Raises:
        CheckpointError: A rank has more or fewer elements than its part of the parameters.
    """
    if states and SHARDED_MASTERS in states[0]:
        for rank, state in enumerate(states):
            sizes = [group.numel() for group in state[SHARDED_MASTERS]]
            yield from sharded_fragments(sizes, shapes, rank=rank, ranks=len(states))
    else:
        yield from _partitioned(states)


def _partitioned(states: Sequence[Mapping[str, Any]]) -> Iterator[Fragment]:
    """Yield the fragments of ZeRO 1 and 2, which says itself where each lies.

    A group's parameters lie one after another, and the whole is cut into equal parts with padding
    at its end, so that a rank's fragment goes on where the rank before it ended
    (runtime/zero/stage_1_and_2.py, `_create_param_mapping`).
    """
    reached: dict[str, int] = {}
    for rank, state in enumerate(states):
        for group, mapping in enumerate(state[_SLICES]):
            for name, address in mapping.items():
                start, size = reached.get(name, 0), address["numel"]
                reached[name] = start + size
                yield Fragment(rank, group, name, start, size, address["start"])


def sharded_fragments(
    sizes: Sequence[int], shapes: Mapping[str, Sequence[int]], *, rank: int, ranks: int
) -> Iterator[Fragment]:
    """Yield one rank's fragments of ZeRO 3: an even share of each parameter.

    A rank's shares follow one another through all its flat groups (of these sizes), which are cut
    by size (`sub_group_size`) and not only where the optimizer's groups are.

    Raises:
        CheckpointError: The groups have more or fewer elements than the shares.
    """
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    wanted = sum(share(count, ranks) for count in counts.values())
    if sum(sizes) != wanted:
        raise CheckpointError(
            f"The optimizer file of rank {rank} is not as DeepSpeed 0.19 writes it: it has "
            f"{'fewer' if sum(sizes) < wanted else 'more'} elements than the model's parameters. "
            "Use the version of refocused that wrote the checkpoint, or choose another step."
        )
    begin = 0  # of the parameter's share, counted through all groups
    for name, count in counts.items():
        padded = share(count, ranks)
        first = min(rank * padded, count)
        end = begin + min(padded, count - first)  # what follows is padding
        group_begin = 0
        for group, size in enumerate(sizes):
            low, high = max(begin, group_begin), min(end, group_begin + size)
            if low < high:
                start, place = first + low - begin, low - group_begin
                yield Fragment(rank, group, name, start, high - low, place)
            group_begin += size
        begin += padded


def flat_groups(optimizer: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Return the flat masters that a ZeRO optimizer updates here, each with its parameters.

    Stage 3 may cut an optimizer's group into several; bf16 at stage 1 has names of its own.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        pairs = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    elif hasattr(optimizer, "bf16_groups"):
        pairs = zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)
    else:
        masters = optimizer.single_partition_of_fp32_groups
        pairs = zip(masters, optimizer.bit16_groups, strict=True)
    return list(pairs)
