"""DeepSpeed's checkpoint files, through our hands: errors are kept, and no code is loaded."""

from __future__ import annotations

import contextlib
import errno
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from refocused import zero_layout
from refocused.engine import hashed_files
from refocused.engine.host_copy import HostMemory, wait_for_copies
from refocused.errors import CheckpointError

_DEEPSPEED_CLASSES = [pkgutil.resolve_name(name) for name in zero_layout.CLASSES]


def load_checked(path: Path, *, map_location: Any = None, mapped: bool = False) -> Any:
    """Read a file of a checkpoint; it can hold tensors and plain values, and run no code.

    Besides them DeepSpeed's files hold four small classes of its own, which are allowed by name.

    Args:
        path: The file.
        map_location: Where its tensors go, as for `torch.load`.
        mapped: Leave the tensors on the disk until they are used.

    Raises:
        CheckpointError: The file holds another object, or is no file of torch's.
    """
    try:
        with torch.serialization.safe_globals(_DEEPSPEED_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).partition("\n")[0].removesuffix(".")
        raise CheckpointError(
            f"{path} cannot be read: {reason}. It was not written by this version of refocused; "
            "resume from another step."
        ) from error


class HashingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine over `hashed_files`.

    An error on one rank must not leave the others inside a collective, so that it is kept in
    `errors` for the owner to gather.

    Attributes:
        written: Files of this save that are on the disk.
        errors: Why others are not.
        copies: The content of files, when `copying` instead of writing.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.name = "refocused"
        self.written: list[hashed_files.WrittenFile] = []
        self.errors: list[OSError] = []
        self.copies: list[tuple[Any, Path]] = []
        self._copying = False
        self._memory: dict[str, HostMemory] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Start a save: forget the last one's files."""
        self.written, self.errors, self.copies = [], [], []

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or keep the reason why not."""
        with self._keeping_errors():
            if self._copying:
                self.copies.append((self._copied(state_dict, Path(path).name), Path(path)))
            else:
                self.written.append(hashed_files.save_hashed(state_dict, Path(path)))

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Let `save` copy content to host memory, where it stays until the next save's copy."""
        self._copying = True
        try:
            yield
            wait_for_copies()
        finally:
            self._copying = False

    def write_copies(self) -> None:
        """Write what was copied."""
        for content, path in self.copies:
            with self._keeping_errors():
                self.written.append(hashed_files.save_hashed(content, path))
        self.copies = []

    def save_swapped(self, source: Path, target: Path) -> None:
        """Copy the optimizer's states from an NVMe drive, or keep the reason why not.

        Gradients lie beside them, and are not part of the state.
        """
        with self._keeping_errors():
            for file in sorted(path for path in source.rglob("*") if path.is_file()):
                name = file.relative_to(source)
                if "gradient" not in str(name):
                    self.written.append(hashed_files.copy_hashed(file, target / name))

    def _copied(self, content: Any, name: str) -> Any:
        try:
            return self._memory.setdefault(name, HostMemory()).copy(content)
        except RuntimeError as error:  # torch has no class of its own for a lack of host memory
            self._memory.clear()
            reason = str(error).partition("\n")[0]
            raise OSError(errno.ENOMEM, f"no copy in host memory: {reason}", name) from error

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.errors.append(error)

    def bearing(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """Wrap a function of DeepSpeed's that writes a file: its failure is kept, not raised."""

        def borne(folder: str) -> None:
            with self._keeping_errors():
                write(folder)

        return borne

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file back, as `load_checked` does."""
        return load_checked(Path(path), map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Nothing to do: the step directory is committed by its owner."""
        return True
