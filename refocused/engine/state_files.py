"""Read a checkpoint's tensor files: tensors and plain values, without code or DeepSpeed."""

from __future__ import annotations

import errno
import pickle
import re
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from refocused.engine.zero_layout import FRAGMENT_ADDRESS, LOSS_SCALERS, STAGE_ENUM, STAGE_MEMBERS
from refocused.system.errors import CheckpointUnavailableError, CorruptCheckpointError

_REGISTRY = threading.Lock()  # torch keeps the names that a file may hold for the whole process


class UnreadableFileError(CorruptCheckpointError):
    """The content of a file cannot be loaded, whatever its checksum says."""


class _Attributes(dict[str, Any]):
    """Stands for a small object of DeepSpeed's: its attributes as a mapping."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.update(state)


def _stage(number: int) -> int:
    """Stand for the Enum of ZeRO's stages: its member is read as its number."""
    return int(number)


def _stage_member(owner: object, name: str) -> int:
    """Stand for `getattr`: Python 3.11.2 pickles a member of an Enum as `getattr(class, name)`."""
    if owner is not _stage or name not in STAGE_MEMBERS:
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {name!r:.80}")
    return STAGE_MEMBERS.index(name)


# Earlier checkpoints hold these objects; engine/shard_files.py saves them as plain values.
_STAND_INS: list[Any] = [
    (_stage, STAGE_ENUM),
    (_stage_member, "builtins.getattr"),
    *((_Attributes, name) for name in (FRAGMENT_ADDRESS, *LOSS_SCALERS)),
]


def read_state(path: Path, *, map_location: Any = "cpu", mapped: bool = False) -> Any:
    """Read a file that `torch.save` wrote.

    Objects of DeepSpeed's in checkpoints of earlier versions become plain values.

    Args:
        path: The file.
        map_location: Where its tensors go, as for `torch.load`.
        mapped: Leave the tensors on the disk until they are used.

    Raises:
        UnreadableFileError: It is cut, holds other objects, or is no such file.
        CheckpointUnavailableError: The operating system cannot read it now.
    """
    try:
        _require_stored(path)
        with _REGISTRY, torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
        _require_own_elements(content)
        return content
    except OSError as error:
        if error.errno == errno.EIO:
            raise UnreadableFileError(f"{path} cannot be read: {error.strerror}.") from error
        raise _failed(path, error.strerror or str(error)) from error
    except Exception as error:  # what a spoilt pickle raises is not limited
        reason = _reason(error)
        if reason.startswith("unable to mmap"):
            raise _failed(path, reason) from error
        raise UnreadableFileError(
            f"{path} cannot be loaded: {reason:.200}. Use the version of refocused that wrote the "
            "checkpoint, or choose another: python launch/checkpoints.py list"
        ) from None


def _require_stored(path: Path) -> None:
    """Refuse compressed members, which `torch.save` never writes: 3 MB can inflate to 3 GB."""
    if not zipfile.is_zipfile(path):
        return  # torch's older form, or none
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if (
                member.compress_type != zipfile.ZIP_STORED
                or member.file_size != member.compress_size
            ):
                raise ValueError(f"its member {member.filename} is compressed")


def _require_own_elements(content: object) -> None:
    """Refuse tensors with more elements than they store: a copy would take what they claim."""
    waiting, seen = [content], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.numel() * one.element_size() > one.untyped_storage().nbytes():
                raise ValueError(f"a tensor claims {tuple(one.shape)} and stores fewer elements")
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one


def _failed(path: Path, reason: str) -> CheckpointUnavailableError:
    return CheckpointUnavailableError(
        f"{path} cannot be read: {reason}. Repair the disk or its permissions, or choose another "
        "checkpoint: python launch/checkpoints.py list"
    )


def _reason(error: Exception) -> str:
    """Take out of torch's long text what is wrong with the file."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it holds {found[1]}, where only tensors and plain values may be"
    if found := re.search(r"WeightsUnpickler error: ([^\n]+)", text):
        return found[1].strip().removesuffix(".")
    return text.partition("\n")[0].removesuffix(".") or type(error).__name__
