"""The layout of DeepSpeed 0.19's ZeRO checkpoints: file names, keys and flat groups.

Shared by resuming and by reading weights. Needs neither torch nor DeepSpeed.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from refocused.system.errors import CheckpointError

# Raised when reading a file of an unknown form.
FORM_ERRORS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)

OPTIMIZER = "optimizer_state_dict"  # in an optimizer file: the states of one rank
PARAM_SHAPES = "param_shapes"  # in a model file: the trained parameters, by group
FROZEN_SHAPES = "frozen_param_shapes"
FROZEN_FRAGMENTS = "frozen_param_fragments"
SHARDED_MASTERS = "fp32_flat_groups"  # of ZeRO 3
PARTITIONED_MASTERS = "single_partition_of_fp32_groups"  # of ZeRO 1 and 2
_SLICES = "param_slice_mappings"

OUTPUT_MOMENTS = "output_moments"  # in the state of a flat group, beside `momentum_buffer`
LOSS_SCALER = "loss_scaler"  # below `OPTIMIZER`: a mapping of its attributes

_OPTIMIZER_FILE = re.compile(r"(?:zero/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero/)?(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """A run of elements of one parameter inside one of a rank's flat tensors."""

    rank: int
    group: int  # index of the flat tensor
    name: str  # of the parameter
    start: int  # in the flattened parameter
    size: int  # elements
    offset: int  # start in the flat tensor


def optimizer_file_rank(name: str) -> int | None:
    """Return the rank of an optimizer file's name or path; None for other files."""
    match = _OPTIMIZER_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def model_file_rank(name: str) -> int | None:
    """Return the rank of a model file's name or path (0 if shared); None for other files."""
    match = _MODEL_FILE.fullmatch(name)
    return None if match is None else int(match[1] or 0)


def is_of_all_ranks(name: str) -> bool:
    """Whether it is the model file that rank 0 writes for all (ZeRO 0, 1 and 2)."""
    match = _MODEL_FILE.fullmatch(name)
    return match is not None and match[1] is None


def is_read_by(name: str, rank: int, *, exact: bool) -> bool:
    """Whether a rank reads a file of `zero/` at a resume: its own if `exact`, else all states."""
    if is_of_all_ranks(name):
        return True
    if exact:
        return rank in (optimizer_file_rank(name), model_file_rank(name))
    return optimizer_file_rank(name) is not None or model_file_rank(name) == 0


def share(count: int, ranks: int) -> int:
    """Return each rank's elements of a parameter under ZeRO 3; the last shares are padded.

    As `_partition_param` in DeepSpeed's runtime/zero/partition_parameters.py.
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
    """Yield the fragments of all trained parameters; those of one parameter in its order.

    `states` are those of each rank below `OPTIMIZER`, under ZeRO 1, 2 or 3. Those of ZeRO 1 and 2
    have addresses: a group's parameters are concatenated and split into equal parts, padded at the
    end, so a rank's fragment continues the previous rank's (`_create_param_mapping` in DeepSpeed's
    runtime/zero/stage_1_and_2.py). Raises CheckpointError if a rank has more or fewer elements than
    its part of the parameters.
    """
    reached: dict[str, int] = {}
    for rank, state in enumerate(states):
        if SHARDED_MASTERS in state:
            sizes = [group.numel() for group in state[SHARDED_MASTERS]]
            yield from sharded_fragments(sizes, shapes, rank=rank, ranks=len(states))
            continue
        for group, mapping in enumerate(state[_SLICES]):
            for name, address in mapping.items():
                start, size = reached.get(name, 0), address["numel"]
                reached[name] = start + size
                yield Fragment(rank, group, name, start, size, address["start"])


def sharded_fragments(
    sizes: Sequence[int], shapes: Mapping[str, Sequence[int]], *, rank: int, ranks: int
) -> Iterator[Fragment]:
    """Yield one rank's fragments of ZeRO 3: an equal share of each parameter.

    The shares are concatenated and split into flat groups (of the given sizes) also within
    parameters, by `sub_group_size`. Raises CheckpointError if the sizes do not match.
    """
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    expected = sum(share(count, ranks) for count in counts.values())
    if sum(sizes) != expected:
        raise CheckpointError(
            f"The optimizer file of rank {rank} has an unknown form: {sum(sizes):,} elements, not "
            f"the {expected:,} of the model's parameters. Use the version of refocused that wrote "
            "the checkpoint, or choose another."
        )
    begin = 0  # of the parameter's share in the concatenation
    for name, count in counts.items():
        padded = share(count, ranks)
        first = min(rank * padded, count)
        end = begin + min(padded, count - first)  # without padding
        group_begin = 0
        for group, size in enumerate(sizes):
            low, high = max(begin, group_begin), min(end, group_begin + size)
            if low < high:
                start, offset = first + low - begin, low - group_begin
                yield Fragment(rank, group, name, start, high - low, offset)
            group_begin += size
        begin += padded


def flat_groups(optimizer: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Return a ZeRO optimizer's flat masters on this rank, each with its parameters."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        pairs = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    elif hasattr(optimizer, "bf16_groups"):
        pairs = zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)
    else:
        masters = optimizer.single_partition_of_fp32_groups
        pairs = zip(masters, optimizer.bit16_groups, strict=True)
    return list(pairs)
