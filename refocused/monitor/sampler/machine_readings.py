"""The machine itself as samples: processors, memory, the run's disk, the network."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from refocused.monitor.readings import SystemSample
from refocused.monitor.sampler.memory import memory_now

GIB, MIB = 2**30, 2**20


class _Traffic(NamedTuple):
    """Bytes since the machine was started; None: unknown."""

    disk_read: int | None
    disk_written: int | None
    received: int | None
    sent: int | None


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
        """Begin to count.

        Args:
            folder: On the disk that is watched.
            host: Name of this machine.
            gpus: GPUs of the machine; None: there is no NVML.
            gpu_note: Why there are none.
            clock: Monotonic seconds.
        """
        self._folder = folder
        self._host = host
        self._gpus, self._gpu_note = gpus, gpu_note
        self._clock = clock
        psutil.cpu_percent()  # what the next call counts from
        self._at, self._traffic = clock(), _traffic()

    def sample(self) -> SystemSample:
        """Return the state now."""
        now, traffic = self._clock(), _traffic()
        seconds = now - self._at
        read, written, received, sent = (
            _rate(before, after, seconds)
            for before, after in zip(self._traffic, traffic, strict=True)
        )
        self._at, self._traffic = now, traffic
        memory = memory_now()
        free, total = self._disk()
        return SystemSample(
            host=self._host,
            gpus=self._gpus,
            gpu_note=self._gpu_note,
            cpu_fraction=psutil.cpu_percent() / 100,
            cpu_cores=os.cpu_count(),
            load_1m=round(os.getloadavg()[0], 2),
            memory_used_gib=round((memory.total - memory.available) / GIB, 3),
            memory_total_gib=round(memory.total / GIB, 3),
            swap_used_gib=round(memory.swap_used / GIB, 3),
            disk_free_gib=free,
            disk_total_gib=total,
            disk_read_mib_per_second=read,
            disk_written_mib_per_second=written,
            network_received_mib_per_second=received,
            network_sent_mib_per_second=sent,
        )

    def _disk(self) -> tuple[float | None, float | None]:
        """Return what is free for us, and the whole, in GiB; None: the folder has gone."""
        try:
            usage = shutil.disk_usage(self._folder)
        except OSError:
            return None, None
        return round(usage.free / GIB, 3), round(usage.total / GIB, 3)


def _traffic() -> _Traffic:
    disks = psutil.disk_io_counters(nowrap=False)  # None in some containers
    devices = psutil.net_io_counters(pernic=True, nowrap=False)
    outside = [device for name, device in devices.items() if name != "lo"]
    return _Traffic(
        disks.read_bytes if disks else None,
        disks.write_bytes if disks else None,
        sum(device.bytes_recv for device in outside),
        sum(device.bytes_sent for device in outside),
    )


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    """Return MiB a second; None where a device has gone or nothing is known."""
    if before is None or after is None or after < before or seconds <= 0:
        return None
    return round((after - before) / MIB / seconds, 3)
