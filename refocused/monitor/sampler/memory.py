"""What memory this machine has, or the container that this runs in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# The files of the limit and of what counts against it, in version 2 and 1.
_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
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


def memory_now(proc: Path = _PROC, groups: Path = _CONTROL_GROUPS) -> Memory:
    """Read what there is now: of the machine, or within the tightest control group around us."""
    memory = _of_machine((proc / "meminfo").read_text())
    for folder, limit, used in _groups_around_us(proc, groups):
        memory = within_group(memory, folder, limit=limit, used=used)
    return memory


def _groups_around_us(proc: Path, groups: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the folder of each control group that holds this process, the outermost last.

    In a container the path may be the host's, of which only the outermost folder is to be seen.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mounts = {"memory": (groups / "memory", _VERSION_1), "": (groups, _VERSION_2)}
    paths = {"memory": "/", "": "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths |= {name: path for name in controllers.split(",") if name in mounts}
    for name, path in paths.items():
        mount, files = mounts[name]
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield (group, *files)
            if group == mount:
                break


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
