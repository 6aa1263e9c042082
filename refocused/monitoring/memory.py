"""What memory this machine has, or the container that this runs in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUPS = (
    # The folder, the files of the limit and of what counts against it, in version 2 and 1.
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_PAGE_CACHE = ("active_file", "inactive_file")


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes.

    Attributes:
        total: Of the machine, or the container's limit where that is less.
        available: What processes may still take; page cache goes for them.
        swap_used: Of the machine.
    """

    total: int
    available: int
    swap_used: int


def memory_now() -> Memory:
    """Read what there is now."""
    memory = _of_machine(_MEMINFO.read_text())
    for folder, limit, used in _CONTROL_GROUPS:
        memory = within_group(memory, folder, limit=limit, used=used)
    return memory


def within_group(memory: Memory, folder: Path, *, limit: str, used: str) -> Memory:
    """Return what a control group leaves of the machine's memory; all, where it has no limit.

    Args:
        memory: The machine's.
        folder: Of the control group.
        limit: File of its limit in bytes; in version 2 `max` is none.
        used: File of the bytes that count against the limit; page cache does too, and can go.
    """
    try:
        most = (folder / limit).read_text().strip()
        if not most.isdecimal():
            return memory
        taken = int((folder / used).read_text()) - _page_cache(folder / "memory.stat")
    except OSError:
        return memory
    return dataclasses.replace(
        memory,
        total=min(memory.total, int(most)),
        available=min(memory.available, max(0, int(most) - taken)),
    )


def _of_machine(meminfo: str) -> Memory:
    kib = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in meminfo.splitlines())
    }
    swap = kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)
    return Memory(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024, swap * 1024)


def _page_cache(statistics: Path) -> int:
    """Return the bytes of files; version 1 calls those of the whole group `total_...`."""
    found: dict[str, int] = {}
    for line in statistics.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name.removeprefix("total_") in _PAGE_CACHE:
            found[name.removeprefix("total_")] = int(value)
    return sum(found.values())
