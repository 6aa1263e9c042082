"""Read a checkpoint's tensor files safely: only tensors and plain values, without DeepSpeed."""

import errno
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from refocused.system.errors import CheckpointUnavailableError, CorruptCheckpointError, as_typed


class UnreadableFileError(CorruptCheckpointError):
    """The content of a file cannot be loaded, even if its checksum is right."""


def read_state(path: Path, *, map_location: Any = "cpu", mapped: bool = False) -> Any:
    """Read a file of tensors and plain values that `torch.save` wrote.

    If `mapped`, the tensors are memory-mapped instead of read.

    Raises:
        UnreadableFileError: It is truncated, contains other objects, or is not such a file.
        CheckpointUnavailableError: The operating system cannot read it at the moment.
    """
    try:
        _require_stored(path)
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
        _require_own_elements(content)
        return content
    except OSError as error:
        if error.errno == errno.EIO:
            raise UnreadableFileError(f"{path} cannot be read: {error.strerror}.") from error
        raise _failed(path, error.strerror or str(error)) from error
    except Exception as error:  # a corrupt pickle may raise anything
        reason = _reason(error)
        if reason.startswith("unable to mmap"):
            raise _failed(path, reason) from error
        raise UnreadableFileError(
            f"{path} cannot be loaded: {reason:.200}. Use the version of refocused that wrote the "
            f"checkpoint, or choose another: {as_typed('checkpoints list')}"
        ) from None


def _require_stored(path: Path) -> None:
    """Reject compressed members, which `torch.save` never writes: 3 MB can inflate to 3 GB."""
    if not zipfile.is_zipfile(path):
        return  # torch's older format, or another file
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            is_stored = member.compress_type == zipfile.ZIP_STORED
            if not is_stored or member.file_size != member.compress_size:
                raise ValueError(f"its member {member.filename} is compressed")


def _require_own_elements(content: object) -> None:
    """Reject tensors with more elements than they store: a copy would allocate all of them."""
    pending, seen = [content], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.numel() * one.element_size() > one.untyped_storage().nbytes():
                raise ValueError(f"a tensor claims {tuple(one.shape)} and stores fewer elements")
        elif isinstance(one, Mapping):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            pending += one


def _failed(path: Path, reason: str) -> CheckpointUnavailableError:
    return CheckpointUnavailableError(
        f"{path} cannot be read: {reason}. Repair the disk or its permissions, or choose another "
        f"checkpoint: {as_typed('checkpoints list')}"
    )


def _reason(error: Exception) -> str:
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it contains {found[1]}, but only tensors and plain values are allowed"
    if found := re.search(r"WeightsUnpickler error: ([^\n]+)", text):
        return found[1].strip().removesuffix(".")
    return text.partition("\n")[0].removesuffix(".") or type(error).__name__
