"""A copy of a checkpoint's content in host memory, so that training can go on while it is written.

The content is pickled as `torch.save` does it, with the bytes of its tensors left out, and built up
again around copies of those bytes. Whatever DeepSpeed puts into a file thereby becomes a snapshot:
tensors that share memory go on sharing it, and small values are frozen with them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.storage import TypedStorage


class HostMemory:
    """Memory that holds the content of one file, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.UntypedStorage] = {}

    def copy(self, content: Any) -> Any:
        """Return a copy of an object and of every tensor in it, in the memory of the last copy.

        Copies from a GPU are queued; `wait_for_copies` tells when they are complete.

        Raises:
            RuntimeError: There is not enough memory.
        """
        pickled = io.BytesIO()
        pickler = _WithoutBytes(pickled)
        pickler.dump(content)
        pickled.seek(0)
        return _WithBytes(pickled, self._copied(pickler.storages)).load()

    def _copied(self, storages: list[TypedStorage]) -> list[TypedStorage]:
        copies = []
        for place, storage in enumerate(storages):
            source = storage._untyped_storage
            buffer = self._buffer(place, source)
            buffer.copy_(source, non_blocking=source.device.type == "cuda")
            copy = TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=buffer, dtype=storage.dtype, _internal=True
            )
            copies.append(copy)
        return copies

    def _buffer(self, place: int, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return the memory for a file's storage number `place`, new when it has another size."""
        kept = self._buffers.pop(place, None)
        if kept is None or kept.nbytes() != source.nbytes():
            del kept  # before there is more
            pinned = source.device.type == "cuda"
            memory = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            kept = memory.untyped_storage()
        self._buffers[place] = kept
        return kept


def wait_for_copies() -> None:
    """Return when all copies from this rank's GPU are complete."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class _WithoutBytes(pickle.Pickler):
    """Pickles an object but for the bytes of its tensors, which it lists."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[TypedStorage] = []
        self._places: dict[tuple[int, torch.dtype], int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, TypedStorage):
            return None
        key = value._untyped_storage._cdata, value.dtype
        if key not in self._places:
            self._places[key] = len(self.storages)
            self.storages.append(value)
        return self._places[key]


class _WithBytes(pickle.Unpickler):
    """Builds an object up again around other storages."""

    def __init__(self, file: io.BytesIO, storages: list[TypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, place: int) -> TypedStorage:
        return self._storages[place]
