"""The files of one step below `zero/`, mapped while their weights are read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.checkpoints.step.step_directory import StepDirectory, in_use
from refocused.checkpoints.step.verify import describe, verify
from refocused.engine.state_files import read_state
from refocused.engine.zero_layout import model_file_rank, optimizer_file_rank
from refocused.evaluate.layout import Layout, find_layout
from refocused.models.causal_lm import NETWORK_PREFIX
from refocused.system.errors import CheckpointError

TOUCHED_BYTES = 64 * 2**20  # read through the maps before they are dropped and made anew

Key = str | int


class ZeroFiles:
    """The files of one step below `zero/`, mapped while they are in use.

    What is read through a map counts as memory of this process until the map is gone, so that all
    maps are dropped after every `TOUCHED_BYTES`.

    Attributes:
        model: Path of each rank's model file below the step directory; of rank 0 alone where it
            holds the whole module (stages 0 to 2).
        optimizer: Path of each rank's optimizer file; none at stage 0.
    """

    def __init__(self, step: StepDirectory) -> None:
        """Name the files as the manifest does.

        Raises:
            CheckpointError: A rank's file is not among them.
        """
        self._step = step
        self.model = _by_rank(step, model_file_rank)
        self.optimizer = _by_rank(step, optimizer_file_rank)
        ranks = step.manifest.world_size
        self._require(self.model, ranks if step.manifest.zero_stage == 3 else 1, "model")
        self._require(self.optimizer, ranks if step.manifest.zero_stage else 0, "optimizer")
        self._mapped: dict[str, dict[str, Any]] = {}
        self._touched_bytes = 0

    def content(self, file: str) -> dict[str, Any]:
        """All that a file holds."""
        if file not in self._mapped:
            self._mapped[file] = read_state(self._step.path / file, mapped=True)
        return self._mapped[file]

    def elements(self, file: str, keys: Sequence[Key], start: int, count: int) -> Tensor:
        """Return some elements `[count]` of the flattened tensor below `keys`; use it at once."""
        if self._touched_bytes > TOUCHED_BYTES:
            self.drop()
        found: Any = self.content(file)
        for key in keys:
            found = found[key]
        if not isinstance(found, Tensor) or not 0 <= start <= start + count <= found.numel():
            raise CheckpointError(
                f"{self._step.path / file} lacks elements of {keys[-1]}. "
                "Choose another step: python launch/checkpoints.py list"
            )
        self._touched_bytes += count * found.element_size()
        return found.detach().flatten()[start : start + count]

    def drop(self) -> None:
        """Let go of all maps; they come back when they are asked for."""
        self._mapped.clear()
        self._touched_bytes = 0

    def _require(self, found: Sequence[str], count: int, what: str) -> None:
        if len(found) != count:
            manifest = self._step.manifest
            raise CheckpointError(
                f"{self._step.path} lists {len(found)} {what} files in zero/; ZeRO stage "
                f"{manifest.zero_stage} on {manifest.world_size} ranks writes {count}. "
                "Choose another step: python launch/checkpoints.py list"
            )


def _by_rank(step: StepDirectory, rank_of: Callable[[str], int | None]) -> list[str]:
    ranks = {name: rank for name in step.manifest.files if (rank := rank_of(name)) is not None}
    return sorted(ranks, key=lambda name: ranks[name])


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
