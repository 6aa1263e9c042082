"""The files of one step below `zero/`, mapped while their weights are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from refocused.checkpoints.step.step_directory import StepDirectory
from refocused.engine.state_files import read_state
from refocused.engine.zero_layout import model_file_rank, optimizer_file_rank
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
