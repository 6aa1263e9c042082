"""Whether a machine's memory holds the copy that a save in the background writes from."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from refocused.errors import ConfigError
from refocused.world import World

MASTER_BYTES = 12  # a parameter's float32 master and Adam's two moments
_LIMITS = (
    # Files of the limit and of what counts against it, in control groups of version 2 and 1.
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def copied_bytes(parameters: int, *, stage: int, dtype: str, world: World) -> int:
    """Return the bytes that this rank's part of a checkpoint holds.

    At stage 0 rank 0 saves for all; below stage 3 it saves the weights of the passes besides.
    """
    weights = parameters * (4 if dtype == "fp32" else 2) if world.is_first and stage < 3 else 0
    if stage == 0:
        return weights + (MASTER_BYTES * parameters if world.is_first else 0)
    return weights + MASTER_BYTES * -(-parameters // world.world_size)


def require_memory_for_copies(
    needed_bytes: int, *, world: World, available: Callable[[], int | None]
) -> None:
    """Refuse copies that a machine has no memory for; every rank must call.

    Args:
        needed_bytes: Of this rank.
        world: The ranks.
        available: Says how many bytes this machine has left; None: unknown.

    Raises:
        ConfigError: On every rank.
    """
    machine = socket.gethostname()
    needed = sum(of for there, of in world.gather((machine, needed_bytes)) if there == machine)
    free = available()
    error = None
    if free is not None and free < needed:
        error = ConfigError(
            f"checkpoint.async keeps a copy of the state of {needed / 1e9:.2f} GB in the memory of "
            f"{machine}, which has {free / 1e9:.2f} GB left. Set checkpoint.async=false."
        )
    world.raise_together(error)


def available_bytes() -> int | None:
    """Return what this machine, or the container this runs in, has left; None: unknown."""
    found = [_meminfo_bytes(), *(_room(Path(limit), Path(used)) for limit, used in _LIMITS)]
    return min((size for size in found if size is not None), default=None)


def _meminfo_bytes() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _room(limit: Path, used: Path) -> int | None:
    """Return a control group's limit less what is used; its page cache counts, and can go."""
    try:
        most, now = limit.read_text().strip(), int(used.read_text())
    except OSError:
        return None
    if not most.isdecimal():  # "max"
        return None
    return max(0, int(most) - now + _page_cache_bytes(used.with_name("memory.stat")))


def _page_cache_bytes(statistics: Path) -> int:
    names = ("active_file ", "inactive_file ", "total_active_file ", "total_inactive_file ")
    found = {
        line.split()[0].removeprefix("total_"): int(line.split()[1])
        for line in statistics.read_text().splitlines()
        if line.startswith(names)
    }
    return sum(found.values())
