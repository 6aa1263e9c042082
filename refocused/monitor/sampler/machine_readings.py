"""Read the CPU, memory, disk and network of this machine."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from refocused.monitor.readings import Rates, SystemSample
from refocused.system.hardware import memory_now

GB, MB = 10**9, 10**6


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
