"""Where each parameter's elements lie in the files of the ranks, for every ZeRO stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.manifest import CheckpointManifest
from refocused.errors import CheckpointError
from refocused.inference.zero_files import FragmentAddress, Key, ZeroFiles

COMPARED_ELEMENTS = 1024  # of a master and its half-precision weight, to tell that they belong


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive elements of a parameter inside one tensor of one file.

    Attributes:
        file: Path below the step directory.
        keys: Where the tensor is in the file.
        start: First element in the flattened tensor.
        count: Elements.
    """

    file: str
    keys: tuple[Key, ...]
    start: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer of the model, spread over fragments.

    Attributes:
        shape: Its whole shape.
        fragments: Together all its elements, in order.
    """

    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a step, under the names of the module that was trained.

    Attributes:
        parameters: Each tensor once, in the module's order.
        ties: Further names, and the name under which their tensor is stored.
    """

    parameters: Mapping[str, Parameter]
    ties: Mapping[str, str]


def find_layout(files: ZeroFiles, manifest: CheckpointManifest) -> Layout:
    """Find the float32 masters of all parameters, and the buffers.

    Raises:
        CheckpointError: The files do not hold every element exactly once.
    """
    states = files.content(files.model[0])
    module: Mapping[str, Tensor] = states["module"]
    ties = _ties(states, module)
    if manifest.zero_stage == 3:
        found = {**_stage_3(files, states), **_frozen_at_stage_3(files, states)}
    elif manifest.zero_stage in (1, 2):
        found = _stages_1_and_2(files, states)
    else:
        found = _stage_0(files.model[0], states, ties, halves=manifest.dtype != "fp32")
    # What has no master is whole in the module: buffers, and below stage 3 frozen parameters.
    for name, tensor in module.items():
        if name not in found and name not in ties and tensor.numel():
            found[name] = _whole(files.model[0], ("module", name), tensor)
    _check(found, [name for name in module if name not in ties])
    return Layout({name: found[name] for name in module if name not in ties}, ties)


def _ties(states: Mapping[str, Any], module: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of tensors; stage 0 does not tell them, but saves a shared storage once."""
    if states["shared_params"] is not None:
        return dict(states["shared_params"])
    first: dict[tuple[int, int], str] = {}
    ties = {}
    for name, tensor in module.items():
        place = tensor.data_ptr(), tensor.numel()
        if first.setdefault(place, name) != name:
            ties[name] = first[place]
    return ties


def _stage_0(
    file: str, states: Mapping[str, Any], ties: Mapping[str, str], *, halves: bool
) -> dict[str, Parameter]:
    """Take the whole masters: the module itself in float32, else the optimizer's copies.

    The copies have no names. The optimizer's groups are subsequences of the module's parameters
    (runtime/fp16/unfused_optimizer.py keeps them as the client optimizer got them), here of
    different dimensions, so that shapes tell whose turn it is; and a copy's first elements must
    round to the module's own.
    """
    if not halves:
        return {}
    groups: Sequence[Sequence[Tensor]] = states["optimizer"]["fp32_groups"]
    turns = [0] * len(groups)
    found = {}
    for name, weight in states["module"].items():
        if name in ties or name in states["buffer_names"]:
            continue
        for number, group in enumerate(groups):
            turn = turns[number]
            if turn < len(group) and _rounds_to(group[turn], weight):
                keys = ("optimizer", "fp32_groups", number, turn)
                found[name] = _whole(file, keys, weight)
                turns[number] += 1
                break
    if turns != [len(group) for group in groups]:
        raise _unreadable(file, "its float32 masters are not those of its weights")
    return found


def _stages_1_and_2(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Take each rank's slices of the flat groups, as the file itself maps them.

    A group's parameters are flattened one after another and the whole is cut evenly between the
    ranks, with padding at its end; `param_slice_mappings` names what each rank has of each
    (runtime/zero/stage_1_and_2.py, `_create_param_mapping`).
    """
    shapes = _shapes(states["param_shapes"])
    fragments: dict[str, list[Fragment]] = {name: [] for name in shapes}
    for file in files.optimizer:
        mappings: Sequence[Mapping[str, FragmentAddress]]
        mappings = files.content(file)["optimizer_state_dict"]["param_slice_mappings"]
        for group, mapping in enumerate(mappings):
            keys = ("optimizer_state_dict", "single_partition_of_fp32_groups", group)
            for name, address in mapping.items():
                fragments[name].append(Fragment(file, keys, address.start, address.numel))
    return {name: Parameter(shapes[name], tuple(parts)) for name, parts in fragments.items()}


def _stage_3(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Take each rank's even share of every parameter.

    A parameter of n elements is padded to a multiple of the ranks and each rank has ceil(n /
    ranks) of it (runtime/zero/partition_parameters.py, `_partition_param`). A rank's shares follow
    one another in the order of `param_shapes`, through all its flat groups, which are
    cut by size (`sub_group_size`) and not where the optimizer's groups are.
    """
    shapes, ranks = _shapes(states["param_shapes"]), len(files.optimizer)
    walks = [_Walk(file, _flat_groups(files, file)) for file in files.optimizer]
    found = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        share = -(-count // ranks)
        taken = [walk.take(share) for walk in walks]
        found[name] = Parameter(shape, tuple(_first(itertools.chain(*taken), count)))
    if any(walk.left() for walk in walks):
        raise _unreadable(files.optimizer[0], "it has more elements than the model's parameters")
    return found


def _frozen_at_stage_3(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Take parameters that are not trained: they are cut alike, but have no masters."""
    found = {}
    for name, shape in (states["frozen_param_shapes"] or {}).items():
        count = torch.Size(shape).numel()
        share = -(-count // len(files.model))
        keys = ("frozen_param_fragments", name)
        parts = [Fragment(file, keys, 0, share) for file in files.model]
        found[name] = Parameter(tuple(shape), tuple(_first(parts, count)))
    return found


class _Walk:
    """A place in a rank's flat groups, which are one after another."""

    def __init__(self, file: str, sizes: Sequence[int]) -> None:
        self._file = file
        self._sizes = list(sizes)
        self._group = 0
        self._start = 0

    def take(self, count: int) -> list[Fragment]:
        """Move on by `count` elements; return where they are."""
        taken = []
        while count:
            if self._group == len(self._sizes):
                raise _unreadable(self._file, "it has fewer elements than the model's parameters")
            part = min(count, self._sizes[self._group] - self._start)
            keys = ("optimizer_state_dict", "fp32_flat_groups", self._group)
            if part:
                taken.append(Fragment(self._file, keys, self._start, part))
            self._start, count = self._start + part, count - part
            if self._start == self._sizes[self._group]:
                self._group, self._start = self._group + 1, 0
        return taken

    def left(self) -> int:
        """Elements that were not taken."""
        return sum(self._sizes[self._group :]) - self._start


def _flat_groups(files: ZeroFiles, file: str) -> list[int]:
    return [
        group.numel() for group in files.content(file)["optimizer_state_dict"]["fp32_flat_groups"]
    ]


def _first(fragments: Iterable[Fragment], count: int) -> Iterator[Fragment]:
    """Cut fragments after `count` elements: what follows is padding."""
    for fragment in fragments:
        part = min(fragment.count, count)
        if part:
            yield dataclasses.replace(fragment, count=part)
        count -= part


def _shapes(groups: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _whole(file: str, keys: tuple[Key, ...], tensor: Tensor) -> Parameter:
    return Parameter(tuple(tensor.shape), (Fragment(file, keys, 0, tensor.numel()),))


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    if master.shape != weight.shape:
        return False
    some = slice(COMPARED_ELEMENTS)
    return torch.equal(master.flatten()[some].to(weight.dtype), weight.flatten()[some])


def _check(found: Mapping[str, Parameter], names: Iterable[str]) -> None:
    for name in names:
        if name not in found:
            raise _unreadable("zero/", f"nothing in it holds {name}")
        have = sum(fragment.count for fragment in found[name].fragments)
        if have != found[name].count:
            raise _unreadable(
                "zero/", f"it has {have:,} elements of {name}, not {found[name].count:,}"
            )


def _unreadable(file: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not as DeepSpeed 0.19 writes it: {what}. Use the version of refocused that "
        "wrote the checkpoint, or choose another step."
    )
