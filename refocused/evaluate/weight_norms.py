"""How far the weights of two steps are apart, by kind of tensor."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict

import torch
from torch import Tensor

from refocused.evaluate.weights import StepWeights
from refocused.system.errors import CheckpointError

ALL = "all"


@dataclasses.dataclass(frozen=True, slots=True)
class NormChange:
    """A kind of tensor in two steps: Euclidean norms over all its elements in all blocks.

    Attributes:
        name: transformers' name, the number of the block replaced by `*`; `all` for the model.
        tensors: How many tensors it stands for.
        a: Norm in the first.
        b: Norm in the second.
        difference: Norm of the difference.
    """

    name: str
    tensors: int
    a: float
    b: float
    difference: float

    @property
    def relative(self) -> float | None:
        """The difference as a share of the first; None where that is all zeros."""
        return self.difference / self.a if self.a else None


def norm_changes(a: StepWeights, b: StepWeights) -> list[NormChange]:
    """Compare the float32 masters of two steps of one shape; the last row is the whole model.

    Raises:
        CheckpointError: They are of models of different shapes.
    """
    odd = [name for name in {**a.shapes, **b.shapes} if a.shapes.get(name) != b.shapes.get(name)]
    if odd:
        raise CheckpointError(
            f"{a.step.path} and {b.step.path} are of different models: {odd[0]} is "
            f"{a.shapes.get(odd[0], 'missing')} and {b.shapes.get(odd[0], 'missing')} "
            f"({len(odd)} such tensors). Their weights cannot be compared."
        )
    squares: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name in a.shapes:
        ours, theirs = a.tensor(name), b.tensor(name)
        found = _square(ours), _square(theirs), _square(theirs.sub_(ours))
        for kind in (re.sub(r"\.\d+\.", ".*.", name), ALL):
            squares[kind].append(found)
    squares[ALL] = squares.pop(ALL)
    return [_change(kind, found) for kind, found in squares.items()]


def _change(name: str, squares: list[tuple[float, float, float]]) -> NormChange:
    a, b, difference = (math.sqrt(sum(column)) for column in zip(*squares, strict=True))
    return NormChange(name, len(squares), a, b, difference)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
