"""Read the CPU, memory, disk and network of this machine."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from refocused.monitor.readings import Rates, SystemSample

GB, MB = 10**9, 10**6
_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# The files of a control group's limit and usage, in version 2 and 1.
_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory in bytes."""

    total: int  # of the machine, or the container's limit if that is less
    available: int  # to processes, page cache included
    swap_used: int  # of the machine


def memory_now(proc: Path = _PROC, groups: Path = _CONTROL_GROUPS) -> FreeMemory:
    """Read the memory of the machine, or of the tightest control group around this process."""
    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    memory = FreeMemory(machine.total, machine.available, swap.used)
    for folder, (limit, used) in _groups_around_us(proc, groups):
        try:
            most = (folder / limit).read_text().strip()
            if not most.isdecimal():  # `max` in version 2
                continue
            # Page cache counts against the limit, but is freed when memory is needed. Version 1
            # has that of the whole group as `total_...`.
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            kinds = {name.removeprefix("total_"): int(value) for name, value in pairs}
            cached = kinds.get("active_file", 0) + kinds.get("inactive_file", 0)
            taken = int((folder / used).read_text()) - cached
        except OSError:
            continue
        memory = dataclasses.replace(
            memory,
            total=min(memory.total, int(most)),
            available=min(memory.available, max(0, int(most) - taken)),
        )
    return memory


def _groups_around_us(proc: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the folder and files of each control group of this process, the outermost last.

    In a container the path may be the host's, with only the outermost folder visible.
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
            yield group, files
            if group == mount:
                break


class SystemReader:
    """Reads this machine's state; rates are since the last reading."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str,
        gpus: int | None = None,
        gpu_note: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count; `folder` is on the watched disk, the others are fields of the reading."""
        self._folder, self._host = folder, host
        self._gpus, self._gpu_note = gpus, gpu_note
        self._clock = clock
        psutil.cpu_percent()  # the next call counts from here
        self._rates = Rates()
        self._rates.since_last(clock(), _traffic_mb())

    def sample(self) -> SystemSample:
        """Return the present reading."""
        read, written, received, sent = self._rates.since_last(self._clock(), _traffic_mb())
        memory = memory_now()
        try:
            disk = shutil.disk_usage(self._folder)
        except OSError:  # the folder is gone
            disk = None
        return SystemSample(
            host=self._host,
            gpus=self._gpus,
            gpu_note=self._gpu_note,
            cpu_fraction=psutil.cpu_percent() / 100,
            cpu_cores=os.cpu_count(),
            load_1m=round(os.getloadavg()[0], 2),
            memory_used_gb=round((memory.total - memory.available) / GB, 3),
            memory_total_gb=round(memory.total / GB, 3),
            swap_used_gb=round(memory.swap_used / GB, 3),
            disk_free_gb=None if disk is None else round(disk.free / GB, 3),
            disk_total_gb=None if disk is None else round(disk.total / GB, 3),
            disk_read_mb_per_second=read,
            disk_written_mb_per_second=written,
            network_received_mb_per_second=received,
            network_sent_mb_per_second=sent,
        )


def _traffic_mb() -> list[float | None]:
    """Return the data read, written, received and sent since the machine was started, in MB."""
    disks = psutil.disk_io_counters(nowrap=False)  # None in some containers
    devices = psutil.net_io_counters(pernic=True, nowrap=False)
    outside = [device for name, device in devices.items() if name != "lo"]
    moved = [disks.read_bytes, disks.write_bytes] if disks else [None, None]
    moved += [sum(card.bytes_recv for card in outside), sum(card.bytes_sent for card in outside)]
    return [None if count is None else count / MB for count in moved]
