"""Where each parameter's elements lie in the files of the ranks, for every ZeRO stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest
from refocused.engine.zero_layout import (
    FORM_ERRORS,
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    OPTIMIZER,
    PARAM_SHAPES,
    masters_key,
    saved_fragments,
    shapes_of,
    share,
)
from refocused.evaluate.zero_files import Key, ZeroFiles
from refocused.system.errors import CheckpointError

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
        CheckpointError: The files do not hold every element exactly once, or are of another form.
    """
    try:
        return _layout(files, manifest)
    except FORM_ERRORS as error:
        raise _unreadable("zero/", f"{type(error).__name__}: {error!s:.100}") from None


def _layout(files: ZeroFiles, manifest: CheckpointManifest) -> Layout:
    states = files.content(files.model[0])
    module: Mapping[str, Tensor] = states["module"]
    ties = _ties(states, module)
    if manifest.zero_stage == 3:
        found = {**_masters(files, states), **_frozen_at_stage_3(files, states)}
    elif manifest.zero_stage:
        found = _masters(files, states)
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


def _masters(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Take each rank's part of every trained parameter, of stages 1 to 3."""
    shapes = shapes_of(states[PARAM_SHAPES])
    ranks = [files.content(file)[OPTIMIZER] for file in files.optimizer]
    fragments: dict[str, list[Fragment]] = {name: [] for name in shapes}
    for saved in saved_fragments(ranks, shapes):
        keys = (OPTIMIZER, masters_key(ranks[saved.rank]), saved.group)
        part = saved.fragment
        fragments[part.name].append(
            Fragment(files.optimizer[saved.rank], keys, part.place, part.size)
        )
    return {name: Parameter(shapes[name], tuple(parts)) for name, parts in fragments.items()}


def _frozen_at_stage_3(files: ZeroFiles, states: Mapping[str, Any]) -> dict[str, Parameter]:
    """Take parameters that are not trained: they are cut alike, but have no masters."""
    found = {}
    for name, shape in (states[FROZEN_SHAPES] or {}).items():
        count = torch.Size(shape).numel()
        keys = (FROZEN_FRAGMENTS, name)
        parts = [Fragment(file, keys, 0, share(count, len(files.model))) for file in files.model]
        found[name] = Parameter(tuple(shape), tuple(_first(parts, count)))
    return found


def _first(fragments: Iterable[Fragment], count: int) -> Iterator[Fragment]:
    """Cut fragments after `count` elements: what follows is padding."""
    for fragment in fragments:
        part = min(fragment.count, count)
        if part:
            yield dataclasses.replace(fragment, count=part)
        count -= part


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
        if have != found[name].count or any(part.count < 0 for part in found[name].fragments):
            raise _unreadable(
                "zero/", f"it has {have:,} elements of {name}, not {found[name].count:,}"
            )


def _unreadable(file: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not as DeepSpeed 0.19 writes it: {what}. Use the version of refocused that "
        "wrote the checkpoint, or choose another step."
    )
