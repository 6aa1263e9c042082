"""Find and read the float32 masters in the files below a checkpoint's `zero/`, for every stage."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.step.step_directory import CHOOSE_ANOTHER, Checkpoint
from refocused.engine import zero_layout
from refocused.engine.state_files import read_state
from refocused.system.errors import CheckpointError

COMPARED_ELEMENTS = 1024  # of a master and its half-precision weight, to match them


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive elements of a parameter, inside one flattened tensor of one file."""

    file: str  # path below the checkpoint
    keys: tuple[str | int, ...]  # of the tensor in the file
    start: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer of the model, and the fragments that hold it in order."""

    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]


class ZeroFiles:
    """The files of one checkpoint below `zero/`, memory-mapped."""

    def __init__(self, step: Checkpoint) -> None:
        """Take the names from the manifest; raise CheckpointError if a rank's file is missing."""
        ranks, stage = step.manifest.world_size, step.manifest.zero_stage
        self._path = step.path
        self._contents: dict[str, dict[str, Any]] = {}
        # Below stage 3, rank 0's model file holds the whole module; stage 0 has no optimizer file.
        self.model = _by_rank(
            step, zero_layout.model_file_rank, "model", ranks if stage == 3 else 1
        )
        self.optimizer = _by_rank(
            step, zero_layout.optimizer_file_rank, "optimizer", ranks if stage else 0
        )

    def content(self, file: str) -> dict[str, Any]:
        """Return all that a file holds."""
        if file not in self._contents:
            self._contents[file] = read_state(self._path / file, mapped=True)
        return self._contents[file]

    def elements(self, fragment: Fragment) -> Tensor:
        """Return a fragment's elements `[count]`."""
        found: Any = self.content(fragment.file)
        for key in fragment.keys:
            found = found[key]
        end = fragment.start + fragment.count
        if not isinstance(found, Tensor) or not 0 <= fragment.start <= end <= found.numel():
            raise CheckpointError(
                f"{self._path / fragment.file} lacks elements of {fragment.keys[-1]}. "
                f"{CHOOSE_ANOTHER}"
            )
        return found.detach().flatten()[fragment.start : end]


def _by_rank(
    step: Checkpoint, rank_of: Callable[[str], int | None], what: str, count: int
) -> list[str]:
    manifest = step.manifest
    names = {rank: name for name in manifest.files if (rank := rank_of(name)) is not None}
    if len(names) != count:
        raise CheckpointError(
            f"{step.path} lists {len(names)} {what} files in zero/; ZeRO stage "
            f"{manifest.zero_stage} on {manifest.world_size} ranks writes {count}. {CHOOSE_ANOTHER}"
        )
    return [names[rank] for rank in sorted(names)]


def find_layout(
    files: ZeroFiles, *, stage: int, dtype: str
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Find the float32 masters of all parameters, and the buffers.

    Returns:
        Each tensor once, by its name in the module that was trained and in that module's order;
        and further names with the name that their tensor is stored under.

    Raises:
        CheckpointError: The files do not hold every element exactly once, or are of another form.
    """
    try:
        states = files.content(files.model[0])
        ties = _ties(states)
        found: dict[str, Parameter] = {}
        if stage:
            found = _masters(files, states)
        elif dtype != "fp32":
            found = _masters_at_stage_0(files.model[0], states, ties)
        if stage == 3:
            found |= _frozen_at_stage_3(files, states)
        names = [name for name in states["module"] if name not in ties]
        return {name: _whole_parameter(name, files, found) for name in names}, ties
    except zero_layout.FORM_ERRORS as error:
        raise _unreadable("zero/", f"{type(error).__name__}: {error!s:.100}") from None


def _whole_parameter(name: str, files: ZeroFiles, found: Mapping[str, Parameter]) -> Parameter:
    """Return where a tensor's elements are, or the tensor of the module if it has no master.

    Those are buffers, and below stage 3 frozen parameters.
    """
    parameter = found.get(name)
    if parameter is None:
        tensor = files.content(files.model[0])["module"][name]
        if not tensor.numel():
            raise _unreadable("zero/", f"nothing in it holds {name}")
        return _whole(files.model[0], ("module", name), tensor)
    count, have = math.prod(parameter.shape), sum(part.count for part in parameter.fragments)
    if have != count or any(part.count < 0 for part in parameter.fragments):
        raise _unreadable("zero/", f"it has {have:,} elements of {name}, not {count:,}")
    return parameter


def _ties(states: Mapping[str, Any]) -> dict[str, str]:
    """Return further names of tensors; stage 0 does not list them, but saves a storage once."""
    if states["shared_params"] is not None:
        return dict(states["shared_params"])
    first: dict[tuple[int, int], str] = {}
    firsts = {
        name: first.setdefault((tensor.data_ptr(), tensor.numel()), name)
        for name, tensor in states["module"].items()
    }
    return {name: other for name, other in firsts.items() if name != other}


def _masters_at_stage_0(
    file: str, states: Mapping[str, Any], ties: Mapping[str, str]
) -> dict[str, Parameter]:
    """Find the optimizer's whole float32 copies.

    They have no names. The optimizer's groups are subsequences of the module's parameters
    (runtime/fp16/unfused_optimizer.py keeps them as the client optimizer got them), here of
    different dimensions, so that shapes show which group is next; and a copy's first elements must
    round to the module's own.
    """
    groups: Sequence[Sequence[Tensor]] = states["optimizer"]["fp32_groups"]
    turns = [0] * len(groups)
    found = {}
    for name, weight in states["module"].items():
        if name in ties or name in states["buffer_names"]:
            continue
        for number, group in enumerate(groups):
            turn = turns[number]
            if turn < len(group) and _rounds_to(group[turn], weight):
                found[name] = _whole(file, ("optimizer", "fp32_groups", number, turn), weight)
                turns[number] += 1
                break
    if turns != [len(group) for group in groups]:
        raise _unreadable(file, "its float32 masters are not those of its weights")
    return found


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    some = slice(COMPARED_ELEMENTS)
    return master.shape == weight.shape and torch.equal(
        master.flatten()[some].to(weight.dtype), weight.flatten()[some]
    )


def _masters(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Find each rank's part of every trained parameter, of stages 1 to 3."""
    shapes = zero_layout.shapes_of(states[zero_layout.PARAM_SHAPES])
    ranks = [files.content(file)[zero_layout.OPTIMIZER] for file in files.optimizer]
    fragments: dict[str, list[Fragment]] = {name: [] for name in shapes}
    for part in zero_layout.saved_fragments(ranks, shapes):
        keys = (zero_layout.OPTIMIZER, zero_layout.masters_key(ranks[part.rank]), part.group)
        found = Fragment(files.optimizer[part.rank], keys, part.place, part.size)
        fragments[part.name].append(found)
    return {name: Parameter(shapes[name], tuple(parts)) for name, parts in fragments.items()}


def _frozen_at_stage_3(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Find the parameters that are not trained: split alike, but without masters."""
    found = {}
    for name, shape in (states[zero_layout.FROZEN_SHAPES] or {}).items():
        left, parts = math.prod(shape), []
        each = zero_layout.share(left, len(files.model))
        for file in files.model:
            if count := min(each, left):  # what follows is padding
                parts.append(Fragment(file, (zero_layout.FROZEN_FRAGMENTS, name), 0, count))
            left -= count
        found[name] = Parameter(tuple(shape), tuple(parts))
    return found


def _whole(file: str, keys: tuple[str | int, ...], tensor: Tensor) -> Parameter:
    return Parameter(tuple(tensor.shape), (Fragment(file, keys, 0, tensor.numel()),))


def _unreadable(file: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not as DeepSpeed 0.19 writes it: {what}. Use the version of refocused that "
        "wrote the checkpoint, or choose another step."
    )
