"""Write DeepSpeed's checkpoint files as plain values, directly or from a copy in host memory."""

import collections
import contextlib
import copy
import enum
import errno
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from refocused.engine import state_files
from refocused.engine.state_files import read_state
from refocused.engine.zero_layout import LOSS_SCALER, OPTIMIZER


def capture() -> dict[str, Any]:
    """Return the states of torch's random generators: dropout and initial weights draw from them.

    Training draws nothing from Python's and NumPy's global generators. Libraries do, at moments
    that a network fault or another mirror changes, so these are no part of the training state.
    """
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Restore the generators' states from `capture`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class HostMemory:
    """Host memory for a copy of one file's content, reused by the next save.

    Tensors that share storage also share it in the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def copy(self, content: Any) -> Any:
        """Return `plain` content with a copy of every tensor, which replaces the last copy.

        Copies from a GPU are asynchronous. Raises RuntimeError if there is not enough memory.
        """
        self._copies = {}
        return plain(content, self._copied)

    def _copied(self, tensor: Tensor) -> Tensor:
        source = tensor.untyped_storage()
        key = source._cdata  # unlike the address, distinct for empty storages
        if key not in self._copies:
            index, pinned = len(self._copies), source.device.type == "cuda"
            buffer = self._buffers.pop(index, None)
            if buffer is None or buffer.nbytes() != source.nbytes():
                buffer = None  # free it before allocating
                memory = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                buffer = memory.untyped_storage()
            buffer.copy_(source, non_blocking=pinned)
            self._buffers[index] = self._copies[key] = buffer
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            self._copies[key], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied


_OBJECTS = (fragment_address, LossScaler, DynamicLossScaler)


def plain(content: Any, copied: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Replace DeepSpeed's own objects by numbers and mappings, and tensors by `copied(tensor)`.

    Pickled objects would depend on the versions of Python and DeepSpeed. Keys stay, so that
    DeepSpeed's `zero_to_fp32` reads the files.
    """
    if isinstance(content, Tensor):
        return copied(content)
    if isinstance(content, enum.Enum):
        return content.value
    if isinstance(content, _OBJECTS):
        return plain(vars(content), copied)
    if type(content) in (dict, collections.OrderedDict):
        result = copy.copy(content)  # keeps the type and a state dictionary's `_metadata`
        result.update((key, plain(value, copied)) for key, value in content.items())
        return result
    if type(content) in (list, tuple, set):
        return type(content)(plain(value, copied) for value in content)
    return content


def loss_scaler(attributes: Mapping[str, Any]) -> LossScaler | DynamicLossScaler:
    """Rebuild DeepSpeed's loss scaler from its saved attributes."""
    kind = DynamicLossScaler if "scale_factor" in attributes else LossScaler
    scaler = kind.__new__(kind)
    vars(scaler).update(attributes)
    return scaler


class HashingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine over `state_files`.

    Errors are collected, not raised, so that no rank is left in a collective.

    Attributes:
        written: Files of this save that are on the disk.
        errors: Of the files that are not.
        copies: Content and path of files copied but not yet written.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.name = "refocused"
        self.written: list[state_files.WrittenFile] = []
        self.errors: list[OSError] = []
        self.copies: list[tuple[Any, Path]] = []
        self._copying = False
        self._memory: dict[str, HostMemory] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Start a save."""
        self.written, self.errors, self.copies = [], [], []

    def save(self, state_dict: Any, path: str) -> None:
        """Write, or copy, one file."""
        with self.keeping_errors():
            if self._copying:
                self.copies.append((self._copied(state_dict, Path(path).name), Path(path)))
            else:
                self.written.append(state_files.save_hashed(plain(state_dict), Path(path)))

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Make `save` copy to host memory; the next copy reuses that memory."""
        self._copying = True
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        finally:
            self._copying = False

    def write_copies(self) -> None:
        """Write the copied files."""
        for content, path in self.copies:
            with self.keeping_errors():
                self.written.append(state_files.save_hashed(content, path))
        self.copies = []

    def save_swapped(self, source: Path, target: Path) -> None:
        """Copy the optimizer states from an NVMe drive, without the gradients beside them."""
        with self.keeping_errors():
            for file in sorted(path for path in source.rglob("*") if path.is_file()):
                name = file.relative_to(source)
                if "gradient" not in str(name):
                    self.written.append(state_files.copy_hashed(file, target / name))

    def _copied(self, content: Any, name: str) -> Any:
        try:
            return self._memory.setdefault(name, HostMemory()).copy(content)
        except RuntimeError as error:  # torch has no specific class for a lack of host memory
            self._memory.clear()
            reason = str(error).partition("\n")[0]
            raise OSError(errno.ENOMEM, f"no copy in host memory: {reason}", name) from error

    @contextlib.contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Collect an error in place of raising it."""
        try:
            yield
        except OSError as error:
            self.errors.append(error)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file, with the objects that DeepSpeed expects."""
        content = read_state(Path(path), map_location=map_location)
        state = content.get(OPTIMIZER)
        if state and LOSS_SCALER in state:
            state[LOSS_SCALER] = loss_scaler(state[LOSS_SCALER])
        return content

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: the checkpointer commits the directory."""
        return True
