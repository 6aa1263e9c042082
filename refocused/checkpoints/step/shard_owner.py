"""What a checkpoint asks of the engine: each rank writes, copies and reads its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class WrittenFile(Protocol):
    """A file that a rank wrote: where, how many bytes, which CRC-32C."""

    @property
    def path(self) -> Path: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def crc32c(self) -> int: ...  # noqa: D102


class Written(Protocol):
    """All that a rank wrote of one save, and what failed."""

    @property
    def files(self) -> Sequence[WrittenFile]: ...  # noqa: D102
    @property
    def errors(self) -> Sequence[OSError]: ...  # noqa: D102


class ShardOwner(Protocol):
    """What is saved: each rank writes and reads its own part."""

    def save_shards(self, folder: Path) -> Written:
        """Write this rank's part below a folder; failures are returned."""
        ...

    def copy_shards(self, folder: Path) -> Callable[[], Written]:
        """Copy this rank's part to host memory; return what writes it below a folder."""
        ...

    def load_shards(self, folder: Path) -> None:
        """Take this rank's part back from a folder."""
        ...

    def load_resharded(self, folder: Path, *, ranks: int) -> None:
        """Take this rank's part out of what `ranks` ranks saved, under any of ZeRO 1, 2 and 3."""
        ...

    @property
    def steps_made(self) -> int:
        """Optimizer updates that the state has behind it."""
        ...
