"""Which GPU of NVML's list is which one of a rank: NVML knows nothing of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Sequence

PCI_BUS_ORDER = "PCI_BUS_ID"


def local_ranks(
    gpus: Sequence[tuple[str | None, str | None]],
    *,
    visible: str | None,
    cuda_order: str | None,
    ranks: int,
) -> list[int | None]:
    """Return the local rank of each GPU; None: it is nobody's, or that cannot be known.

    Local rank N uses CUDA's device N, and CUDA numbers what CUDA_VISIBLE_DEVICES names. NVML
    numbers in the order of the PCI bus. CUDA does so too where it is told to; else it begins with
    the fastest, which is the same order when all are of one kind.

    Args:
        gpus: UUID and name of each, in NVML's order; None: unknown.
        visible: CUDA_VISIBLE_DEVICES; None: it is not set.
        cuda_order: CUDA_DEVICE_ORDER; None: it is not set.
        ranks: Of the run, on this machine.
    """
    devices = visible_devices(gpus, visible=visible, cuda_order=cuda_order)[:ranks]
    owners: list[int | None] = [None] * len(gpus)
    for rank, index in enumerate(devices):
        if index is not None:
            owners[index] = rank
    return owners


def visible_devices(
    gpus: Sequence[tuple[str | None, str | None]], *, visible: str | None, cuda_order: str | None
) -> list[int | None]:
    """Return NVML's number of each of CUDA's devices; None: which one it is cannot be known.

    As CUDA does it: a word is a number or the beginning of one UUID; what follows a word that
    names no GPU is not seen, and a GPU that is named twice hides all.
    """
    kinds = {name for _, name in gpus if name is not None}
    same_order = cuda_order == PCI_BUS_ORDER or len(kinds) <= 1
    if visible is None:
        return [index if same_order else None for index in range(len(gpus))]
    found: list[int | None] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal() and int(word) < len(gpus):
            found.append(int(word) if same_order else None)
        elif word.startswith("GPU-") and len(meant := _by_uuid(gpus, word)) == 1:
            found.append(meant[0])
        else:
            break
    known = [index for index in found if index is not None]
    return [] if len(set(known)) < len(known) else found


def _by_uuid(gpus: Sequence[tuple[str | None, str | None]], beginning: str) -> list[int]:
    return [index for index, (uuid, _) in enumerate(gpus) if (uuid or "").startswith(beginning)]
