"""The weights of a saved step, one tensor or one piece of it at a time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from refocused.checkpoints.step.step_directory import StepDirectory, in_use
from refocused.checkpoints.step.verify import describe, verify
from refocused.evaluate.layout import Layout, find_layout
from refocused.evaluate.zero_files import ZeroFiles
from refocused.models.causal_lm import NETWORK_PREFIX
from refocused.system.errors import CheckpointError

PIECE_ELEMENTS = 2**22
_OTHERS = "Choose another step: python launch/checkpoints.py list"


class StepWeights:
    """The float32 masters of every parameter, and the buffers, under transformers' names.

    As long as it exists, retention leaves the step alone.

    Attributes:
        step: Where they come from.
        shapes: The shape of each tensor, padding rows of the vocabulary included, in the model's
            order; tied ones under one name.
        ties: Further names, and the name under which their tensor is stored.
    """

    def __init__(self, step: StepDirectory, files: ZeroFiles, layout: Layout) -> None:
        """Read through a layout; see `open_weights`."""
        self.step = step
        self._files = files
        self._parameters = {_plain(name): found for name, found in layout.parameters.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: found.shape for name, found in self._parameters.items()
        }
        self.ties: Mapping[str, str] = {
            _plain(other): _plain(name) for other, name in layout.ties.items()
        }

    def pieces(self, name: str, *, elements: int | None = None) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, `[at most PIECE_ELEMENTS]` a piece.

        A piece is a view of the file: it has to be used before the next one is asked for.

        Args:
            name: Which tensor.
            elements: Stop after so many; None: at its end.
        """
        parameter = self._parameters[name]
        left = parameter.count if elements is None else elements
        for part in parameter.fragments:
            for start in range(0, min(part.count, left), PIECE_ELEMENTS):
                count = min(PIECE_ELEMENTS, part.count - start, left - start)
                yield self._files.elements(part.file, part.keys, part.start + start, count)
            left -= part.count
            if left <= 0:
                return

    def tensor(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one whole tensor, rounded to `dtype`."""
        return joined(self.pieces(name), self.shapes[name], dtype=dtype)


def joined(pieces: Iterable[Tensor], shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Make one tensor of its pieces, rounded to `dtype`."""
    whole = torch.empty(shape, dtype=dtype)
    flat, filled = whole.view(-1), 0
    for piece in pieces:
        flat[filled : filled + len(piece)] = piece
        filled += len(piece)
    return whole


def open_weights(step: StepDirectory) -> StepWeights:
    """Verify every byte of a step, and find its weights.

    Raises:
        CheckpointError: A file of it is damaged or missing, or is not as DeepSpeed writes it.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(in_use(step.path))
        except OSError as error:
            raise CheckpointError(
                f"{step.path} cannot be read any more ({error.strerror}). {_OTHERS}"
            ) from None
        problems = verify(step, deep=True)
        if problems:
            raise CheckpointError(f"{step.path} is corrupt: {describe(problems)}. {_OTHERS}")
        files = ZeroFiles(step)
        weights = StepWeights(step, files, find_layout(files, step.manifest))
        weakref.finalize(weights, stack.pop_all().close)
    return weights


def _plain(name: str) -> str:
    """Return transformers' own name of a tensor of our wrapper."""
    return name.removeprefix(NETWORK_PREFIX)
